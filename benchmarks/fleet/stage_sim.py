"""A peer whose layers take a given time and give messages of a given size: everything but the compute is real.

python -m benchmarks.fleet.stage_sim --steps 4 --micro-batches 32 --bytes 1000000 --forward-s 0.1 --backward-s 0.2
    --peers PEERS.json --key KEY --folder FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from shoal import wire
from shoal.net.identity import Identity
from shoal.spec.run import Run
from shoal.stages.__main__ import peers_of, train
from shoal.stages.report import Measured
from shoal.stages.routes import Commit, Sums
from shoal.stages.training import journaled


class Simulated:
    """Implements `shoal.stages.work.Work`."""

    part_bytes = state_bytes = 1 << 10
    held_out = sets = 0

    def __init__(self, args: argparse.Namespace, first: bool, last: bool) -> None:
        self.micro_batches, self.message_bytes = args.micro_batches, args.bytes
        self._first, self._last, self._args = first, last, args
        self._message = os.urandom(args.bytes)

    def begin(self, step: int) -> None: ...

    def forward(self, m: int, message: bytes | None) -> bytes | None:
        assert (message is None) == self._first
        time.sleep(self._args.forward_s + (self._args.backward_s if self._last else 0.0))
        return self._message

    def backward(self, m: int, message: bytes) -> bytes | None:
        assert len(message) == self.message_bytes
        time.sleep(self._args.backward_s)
        return None if self._first else self._message

    def check(self, kind: str, payload: bytes | memoryview) -> None: ...

    def part(self) -> bytes:
        return b"part"

    def total(self, parts: list[bytes] | None) -> float:
        return 1.0

    def loss(self) -> float:
        return 1.0

    def factor(self, step: int, squares: float, loss: float) -> Commit:
        return Commit(step, 1.0, 1.0, 1.0)

    def apply(self, commit: Commit) -> None: ...

    def measure(self, m: int, message: bytes | None) -> tuple[bytes | None, Measured | None]:
        raise NotImplementedError  # there is no held-out data

    def add_up(self, sums: Sums | None, step: int, measured: list[Measured]) -> Sums:
        raise NotImplementedError

    def tell(self, sums: Sums) -> None: ...

    def digest(self) -> str:
        return "same"

    def state(self) -> bytes:
        return b"state"

    def restore(self, step: int, state: bytes) -> None: ...

    def save(self, step: int) -> None: ...

    def saved(self) -> list[int]:
        return [0]

    def load(self, step: int) -> None: ...


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--forward-s", type=float, required=True)
    parser.add_argument("--backward-s", type=float, required=True)
    parser.add_argument("--stages", type=int, default=4)
    for name in ("--peers", "--key", "--folder"):
        parser.add_argument(name, type=Path, required=True)
    args = parser.parse_args()
    spec = Run.model_validate(
        {
            "name": "simulated",
            "data": {"train": "none"},
            "train": {"steps": args.steps},
            "swarm": {"stages": {"count": args.stages}},
        }
    )
    identity = Identity.at(args.key)
    layout, addresses = peers_of(args.peers, spec)
    stage = next(s for s, peers in enumerate(layout) if identity.id in peers)
    work = Simulated(args, stage == 0, stage == len(layout) - 1)
    host, port = wire.address_of(addresses[identity.id].tcp[0])
    with journaled(args.folder, spec.steps) as event:
        asyncio.run(train(spec, identity, layout, addresses, work, event, host, port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
