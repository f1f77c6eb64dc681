"""A replica of torchft (or its lighthouse) for `kill.py`: a step's protocol, with a gradient that costs nothing."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

PARAMETERS = 250_000
STEP_S = 0.1


def main(folder: Path, who: str) -> None:
    if who == "lighthouse":
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=20, heartbeat_timeout_ms=1000
        )
        (folder / "address.new").write_text(server.address())
        (folder / "address.new").rename(folder / "address")
        while True:
            time.sleep(1)
    from torchft import Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(PARAMETERS))
    inner = torch.optim.AdamW([weight])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=lambda s: weight.data.copy_(s["w"]),
        state_dict=lambda: {"w": weight.data.clone()},
        min_replica_size=1,
        replica_id=f"r{who}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=(folder / "address").read_text(),
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=60),
        hostname="127.0.0.1",
    )
    optimizer = Optimizer(manager, inner)
    with open(folder / f"steps-{who}", "a", buffering=1) as log:
        while True:
            optimizer.zero_grad()
            time.sleep(STEP_S)
            weight.grad = torch.ones(PARAMETERS)
            manager.allreduce(weight.grad).wait()
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() > before:
                log.write(f"{time.time()} {manager.num_participants()}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
