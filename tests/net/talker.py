"""An endpoint in a process of its own that lines of JSON tell what to do: for the sites of an emulated network."""

from __future__ import annotations

import asyncio
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from shoal.emulate import Wan
from shoal.net.api import Address, Message, PeerId
from shoal.net.endpoint import Peers, connect
from shoal.net.identity import Identity


class Talker:
    """The other end of the lines."""

    def __init__(self, wan: Wan, site: str, **options: Any) -> None:
        self.site, self.events = site, list[dict[str, Any]]()
        self._answers: queue.Queue[Any] = queue.Queue()
        command = [sys.executable, "-m", "tests.net.talker", json.dumps(options)]
        self._process = wan.run(site, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._listen, daemon=True).start()
        self.id: PeerId = self._answers.get(timeout=20)

    def do(self, what: str, timeout_s: float = 30.0, **fields: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **fields}) + "\n")
        self._process.stdin.flush()
        answer = self._answers.get(timeout=timeout_s)
        if isinstance(answer, dict) and "error" in answer:
            raise ConnectionError(answer["error"])
        return answer

    def know(self, other: Talker, tcp: bool = True) -> None:
        relays, direct, at = other.do("address")
        self.do("know", peer=other.id, address=[relays, direct, at if tcp else []])

    def ask(self, other: Talker, up: int = 0, down: int = 0, timeout_s: float = 10.0) -> float:
        """Seconds for so many bytes there and back."""
        took: float = self.do("ask", timeout_s + 10, peer=other.id, up=up, down=down, within_s=timeout_s)
        return took

    def link(self, other: Talker) -> dict[str, Any]:
        found: dict[str, Any] = self.do("links").get(other.id, {})
        return found

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["kind"] == kind]

    def until(self, true: Callable[[Talker], Any], within_s: float = 10.0) -> float:
        """How long it took."""
        began = time.monotonic()
        while not true(self):
            assert time.monotonic() - began < within_s, f"it did not happen at {self.site}: {self.events}"
            time.sleep(0.02)
        return time.monotonic() - began

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "kind" in said:
                self.events.append(said)
            else:
                self._answers.put(said["answer"])


async def talk(options: dict[str, Any]) -> None:
    def say(**fields: Any) -> None:
        print(json.dumps(fields), flush=True)

    began = time.time()
    secret = options.pop("secret", "")
    me = Identity(bytes.fromhex(secret)) if secret else Identity.new()
    peers = connect(
        me, lambda peer, proof: True, lambda kind, **f: say(kind=kind, at_s=time.time() - began, **f), **options
    )

    async def give(peer: PeerId, message: Message) -> Message:
        return Message("given", {}, bytes(message.fields["down"]))

    peers.on("give", give, most_body=1 << 30)
    await peers.start()
    say(answer=me.id)
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    threading.Thread(
        target=lambda: [loop.call_soon_threadsafe(lines.put_nowait, x) for x in sys.stdin], daemon=True
    ).start()
    while True:
        told = json.loads(await lines.get())
        try:
            say(answer=await _do(peers, told))
        except ConnectionError as e:
            say(answer={"error": f"{type(e).__name__}: {e}"})


async def _do(peers: Peers, told: dict[str, Any]) -> Any:
    if told["do"] == "address":
        a = peers.address()
        return [a.relays, a.direct, a.tcp]
    if told["do"] == "know":
        peers.know(told["peer"], Address(*(tuple(x) for x in told["address"])))
        return True
    if told["do"] == "links":
        return {k: vars(v) for k, v in peers.links().items()}
    if told["do"] == "close":
        await peers.close()
        return True
    began = time.monotonic()
    message = Message("give", {"down": told["down"]}, bytes(told["up"]))
    await peers.ask(told["peer"], message, told["within_s"], most_body=1 << 30)
    return time.monotonic() - began


if __name__ == "__main__":
    asyncio.run(talk(json.loads(sys.argv[1])))
