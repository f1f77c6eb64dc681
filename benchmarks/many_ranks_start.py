"""What a rank holds once it has joined, by how many there are: groups (fake, to 4,096) and descriptors (real gloo).

    python benchmarks/many_ranks_start.py [--most 64]

`before` is how Shoal laid a mesh out until it was changed (docs/decisions/054): torch's device meshes with a group for
every axis of three of them, and gloo connected with everybody. Groups are counted on torch's fake process group, one
rank of so many; descriptors in real processes of this machine, which the last column starts and joins.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from tests.forked import fork
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.parallel.place import JOIN_TIMEOUT, lay_out
from shoal.spec.mesh import Sizes

CPU = torch.device("cpu")
Lay = Callable[[int, int, Sizes, bool], object]


def before(rank: int, world: int, sizes: Sizes, experts: bool) -> object:
    pp, copies, shard, cp, tp, ep = (getattr(sizes, name) for name in Sizes.__dataclass_fields__)
    cuts = [{"pp": pp, "replicate": copies, "shard": shard * cp, "tp": tp}]
    cuts += [{"outer": pp * copies * shard, "cp": cp, "inner": tp}] if cp > 1 else []
    cuts += [{"pp": pp, "replicate": copies, "shard": shard * cp * tp // ep, "ep": ep}] if experts else []
    backend = dist.get_backend()
    return [
        init_device_mesh("cpu", tuple(c.values()), mesh_dim_names=tuple(c), backend_override=dict.fromkeys(c, backend))
        for c in cuts
    ]


def now(rank: int, world: int, sizes: Sizes, experts: bool) -> object:
    return lay_out(rank, world, CPU, sizes, experts)


MESHES: dict[str, Callable[[int], tuple[Sizes, bool]]] = {
    "dp_shard": lambda n: (Sizes(dp_shard=n), False),
    "dp_shard x cp 2 x tp 4": lambda n: (Sizes(dp_shard=n // 8, cp=2, tp=4), False),
    "pp 2 x dp_shard x tp 4, experts, ep 4": lambda n: (Sizes(pp=2, dp_shard=n // 8, tp=4, ep=4), True),
}


def groups(lay: Lay, sizes: Sizes, experts: bool) -> tuple[int, float]:
    """Of one rank, and the seconds that it takes."""
    dist.init_process_group("fake", rank=0, world_size=sizes.world, store=FakeStore())
    began = time.process_time()
    lay(0, sizes.world, sizes, experts)
    took_s = time.process_time() - began
    held = len(c10d._world.pg_map)
    dist.destroy_process_group()
    return held, took_s


def descriptors(lay: Lay, world: int, lazy: bool) -> tuple[int, float]:
    """The most of any rank, and the seconds until all had joined and added a number up."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def work(rank: int) -> int:
            os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
            at = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=at, rank=rank, world_size=world, timeout=JOIN_TIMEOUT)
            lay(rank, world, Sizes(dp_shard=world), False)
            dist.all_reduce(torch.ones(1))
            (folder / f"opened-{rank}").write_text(str(len(os.listdir("/proc/self/fd"))))
            dist.all_reduce(torch.ones(1))
            return 0

        began = time.perf_counter()
        ranks = [fork(partial(work, rank), folder / "log") for rank in range(world)]
        failed = [status for _, status in (os.waitpid(pid, 0) for pid in ranks) if status]
        if failed:
            raise SystemExit((folder / "log").read_text()[-2000:])
        opened = max(int((folder / f"opened-{rank}").read_text()) for rank in range(world))
        return opened, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=64, metavar="N", help="real processes; 128 want 10 GB")
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = f"{'ranks':>7}{'before':>9}{'now':>6}{'before s':>11}{'now s':>8}"
    print(f"{'groups of a rank (fake)':<40}{columns}")
    worst = 0
    for name, of in MESHES.items():
        for world in (8, 64, 512, 4096):
            (old, old_s), (new, new_s) = groups(before, *of(world)), groups(now, *of(world))
            worst = max(worst, new)
            print(f"{name:<40}{world:>7}{old:>9}{new:>6}{old_s:>11.3f}{new_s:>8.3f}", flush=True)
    print(f"\n{'descriptors of a rank (gloo, dp_shard)':<40}{columns}")
    ratio = 1.0
    for world in (n for n in (8, 16, 32, 64, 128) if n <= args.most):
        (old, old_s), (new, new_s) = descriptors(before, world, lazy=False), descriptors(now, world, lazy=True)
        ratio = old / new
        print(f"{'':<40}{world:>7}{old:>9}{new:>6}{old_s:>11.2f}{new_s:>8.2f}", flush=True)
    print(f"at most {worst} groups at any number of ranks; descriptors at the largest: {ratio:.1f} times fewer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
