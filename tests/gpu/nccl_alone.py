"""Trains a few steps over an NCCL group of one, as DDP and as FSDP2; prints a line of losses for each."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shoal.data.feed import Feed
from shoal.data.order import Order
from shoal.data.sources import open_sources
from shoal.data.windows import Windows
from shoal.parallel.build import build
from shoal.parallel.place import Place
from shoal.spec.mesh import Sizes
from shoal.train.decide import decide
from shoal.train.loop import Training, train_step
from shoal.train.optim import Optimizers
from shoal.train.writers import unsaved
from tests.train.tiny import make_run


def main(workspace: Path) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{workspace}/nccl-store", rank=0, world_size=1)
    dense = init_device_mesh("cuda", (1, 1, 1, 1), mesh_dim_names=("pp", "replicate", "shard", "tp"))
    changes = {"resources.device": "cuda", "train.precision": "fp32", "train.steps": 8, "mesh.micro_batch": 8}
    run = decide(make_run(workspace / "data", **changes), workspace, 1).run
    for shard in (1, 2):  # 2 asks for FSDP2; the mesh has one member all the same
        place = Place(0, 1, torch.device("cuda", 0), Sizes(dp_shard=shard), dense)
        model = build(run, place)
        windows = Windows(open_sources(run.data.train, run.data, workspace), run.data.seq_len, True)
        feed = Feed(windows, Order(windows.sizes, [1.0], run.seed), run.train.batch, 0, 1, 8)
        training = Training(
            run,
            place,
            model,
            Optimizers(run.train.optimizer, model.named_parameters()),
            feed,
            tell=lambda kind, **fields: None,
            told_to_stop=lambda: False,
            evaluate=lambda step: None,
            saves=unsaved(),
        )
        records = [train_step(training, step) for step in range(8)]
        print(*(r["loss"] for r in records if r))
        feed.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
