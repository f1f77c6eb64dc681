"""A real peer whose micro-batches take at least a given time, as on a device of that speed: with two cores for all the
peers, what they would wait for is mostly each other, and no two runs would compare.

    python -m benchmarks.fleet.stage_paced RUN.yaml --forward-s 0.02 --backward-s 0.04
        --peers PEERS.json --key KEY --folder FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import torch

from shoal import wire
from shoal.net.identity import Identity
from shoal.spec import load
from shoal.stages.__main__ import peers_of, train
from shoal.stages.layers import StageLayers
from shoal.stages.training import journaled


class Paced(StageLayers):
    forward_s = backward_s = 0.0

    def forward(self, m: int, message: bytes | None) -> bytes | None:
        began = time.perf_counter()
        out = super().forward(m, message)
        _wait(began + self.forward_s + (self.backward_s if self.decoder.last else 0.0))
        return out

    def backward(self, m: int, message: bytes) -> bytes | None:
        began = time.perf_counter()
        out = super().backward(m, message)
        _wait(began + self.backward_s)
        return out


def _wait(until: float) -> None:
    time.sleep(max(0.0, until - time.perf_counter()))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--forward-s", type=float, required=True)
    parser.add_argument("--backward-s", type=float, required=True)
    for name in ("--peers", "--key", "--folder"):
        parser.add_argument(name, type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = load(args.file).run
    identity = Identity.at(args.key)
    layout, addresses = peers_of(args.peers, spec)
    stage = next(s for s, peers in enumerate(layout) if identity.id in peers)
    work = Paced(spec, stage, args.folder, torch.device("cpu"))
    work.forward_s, work.backward_s = args.forward_s, args.backward_s
    host, port = wire.address_of(addresses[identity.id].tcp[0])
    with journaled(args.folder, spec.steps) as event:
        asyncio.run(train(spec, identity, layout, addresses, work, event, host, port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
