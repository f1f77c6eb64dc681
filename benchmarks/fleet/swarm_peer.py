"""One peer of a swarm for benchmarks and tests: a real node, with a trainer of the caller's choice.

python -m benchmarks.fleet.swarm_peer PEER.json

PEER.json: {"folder", "key", "run": the run file, "trainer": command, "peers": {id: [tcp address]}, "port"}.
Its peers are told, and admitted by their keys: invitations and gossip are tested elsewhere. Ends with the run, or with
SIGTERM, by which it leaves; its events are in FOLDER/events.jsonl, its status in FOLDER/status.json.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

from shoal.errors import Stopped
from shoal.journal.journal import Journal
from shoal.net.api import Address
from shoal.net.endpoint import connect
from shoal.net.identity import Identity
from shoal.spec.run import Run
from shoal.swarm.node import Node
from shoal.swarm.view import status

SWARM = "5" * 64


async def peer(config: dict[str, Any]) -> int:
    folder = Path(config["folder"])
    journal = Journal(_made(folder) / "events.jsonl")
    identity = Identity.at(Path(config["key"]))
    admitted = set(config["peers"])
    endpoint = connect(
        identity, lambda peer, proof: peer in admitted, journal.note, quic=False, port=int(config.get("port", 0))
    )
    await endpoint.start()
    run, trainer = Run.model_validate(config["run"]), tuple(config["trainer"])
    node = Node(folder, SWARM, identity, endpoint, run, trainer, admitted=lambda p: p in admitted, event=journal.note)
    for other, addresses in config["peers"].items():
        if other != identity.id:
            endpoint.know(other, Address(tcp=tuple(addresses)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, node.leave)
    shows = asyncio.create_task(_show(node, folder))
    try:
        return await node.run()
    except Stopped:
        return 0
    finally:
        shows.cancel()
        _write(folder, node)
        await endpoint.close()


async def _show(node: Node, folder: Path) -> None:
    while True:
        _write(folder, node)
        await asyncio.sleep(0.5)


def _write(folder: Path, node: Node) -> None:
    new = folder / "status.new"
    head = node.chain.head
    said = status(node, []) | {"digest": node.work.digests.get(head.hash), "peers": list(head.members)}
    new.write_text(json.dumps(said))
    new.replace(folder / "status.json")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(asyncio.run(peer(json.loads(Path(sys.argv[1]).read_text()))))
