"""A peer of the NAT tests: an endpoint that obeys lines of JSON on its stdin and answers on its stdout.

{"know": ID, "address": […]} starts a link; {"ask": ID, "within_s": S} answers once the peer has; {"links": true}
tells how each link stands; {"events": true} what has happened. The first line says who and where it is.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from shoal.net.api import Address, Message, PeerId, Refused, Unreachable
from shoal.net.endpoint import connect
from shoal.net.identity import Identity


async def echo(peer: PeerId, message: Message) -> Message:
    return Message("echo", {}, message.body)


class Peer:
    def __init__(self, relays: list[str]) -> None:
        self.said: list[dict[str, Any]] = []
        self.ends = connect(Identity.new(), lambda peer, proof: True, self.note, relays=relays)
        self.ends.on("echo", echo, most_body=64 << 20)

    def note(self, kind: str, **fields: Any) -> None:
        self.said.append({"kind": kind, "at_s": round(time.time(), 2), **fields})

    def where(self) -> dict[str, Any]:
        at = self.ends.address()
        return {"id": self.ends.id, "address": [at.relays, at.direct, at.tcp]}

    async def obey(self, line: dict[str, Any]) -> dict[str, Any]:
        match line:
            case {"know": peer, "address": address}:
                self.ends.know(peer, Address(*map(tuple, address)))
                return self.where()
            case {"ask": peer, "within_s": within_s, **rest}:
                begun = time.monotonic()
                body = os.urandom(int(rest.get("bytes", 10)))
                while True:
                    try:
                        answer = await self.ends.ask(peer, Message("echo", {}, body), 5.0 + len(body) / 1e5, 64 << 20)
                        took_s = time.monotonic() - begun
                        return {"took_s": took_s, "right": answer.body == body, "way": self.ends.links()[peer].way}
                    except (Unreachable, Refused) as e:
                        if time.monotonic() - begun > within_s:
                            return {"failed": str(e)}
                        await asyncio.sleep(0.1)
            case {"links": True}:
                return {peer: [link.way, link.heard_s, link.rtt_s] for peer, link in self.ends.links().items()}
            case {"events": True}:
                return {"events": self.said}
        return self.where()

    async def run(self) -> None:
        await self.ends.start()
        reader = asyncio.StreamReader(limit=1 << 20)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        print(json.dumps(self.where()), flush=True)
        while line := await reader.readline():
            print(json.dumps(await self.obey(json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(Peer(sys.argv[1:]).run())
