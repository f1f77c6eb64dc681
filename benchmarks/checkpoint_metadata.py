"""What a checkpoint's metadata costs as ranks grow: bytes, rows, CPU seconds and memory, without a cluster.

    python benchmarks/checkpoint_metadata.py [--models llama3-8b llama3-70b] [--ranks 8 64 1024 4096] [--tp 8]

torch's fake process group gives one process the place of a rank of many; tensors have shapes and no memory (`meta`).
State: fp32 weights and AdamW's two moments, sharded over all ranks (FSDP2), or over tensor parallelism too (`--tp`).
The checksums are random bytes of the right number. Each row is a process of its own: its peak memory is its own.

  part     a rank's own: what it writes is worked out (once a run), and the size of what it says of its file
  merge    rank 0, a save: all parts decoded, put together and checked
  encode   rank 0, a save: the manifest as bytes
  decode   rank 0, a load: the manifest read and checked
  own      every rank, a load: what rank 0 sent is decoded and the rank's own reads are derived, on the same mesh
  half     the same on a mesh of half as many ranks
  more     what the process needed beside torch and the shapes, at most

Bars (8B at 1,024 ranks): manifest at most 8 MB, merge and encode at most 2 s, a rank's own at most 0.5 s.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

NAME = (1000, 1)
HEADER_BYTES = 90_000  # about what a file's safetensors header has
BARS = {("llama3-8b", 1024): (8.0, 2.0, 0.5)}
COLUMNS = (
    "model",
    "ranks",
    "rows",
    "manifest MB",
    "part MB",
    "part s",
    "merge s",
    "encode s",
    "decode s",
    "own s",
    "half s",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama3-8b", "llama3-70b"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 1024, 4096])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(args.one, args.ranks[0], args.tp)
        return 0
    print(f"{' '.join(f'{column:>12}' for column in COLUMNS)} {'more MB':>9}")
    missed = 0
    for model in args.models:
        for ranks in args.ranks:
            command = [sys.executable, __file__, "--one", model, "--ranks", str(ranks), "--tp", str(args.tp)]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            print(said, end="", flush=True)
            missed += _missed(model, ranks, said)
    return 1 if missed else 0


def _missed(model: str, ranks: int, said: str) -> bool:
    if (model, ranks) not in BARS:
        return False
    values = dict(zip(COLUMNS, said.split(), strict=False))
    most_mb, most_merge_s, most_own_s = BARS[model, ranks]
    merge_s = float(values["merge s"]) + float(values["encode s"])
    own_s = max(float(values["own s"]), float(values["part s"]))
    missed = float(values["manifest MB"]) > most_mb or merge_s > most_merge_s or own_s > most_own_s
    print(f"  bars: {values['manifest MB']} of {most_mb} MB, merge and encode {merge_s:.2f} of {most_merge_s} s, "
          f"a rank's own {own_s:.2f} of {most_own_s} s: {'MISSED' if missed else 'met'}")  # fmt: skip
    return missed


def measure(model: str, world: int, tp: int) -> None:
    from shoal.checkpoint.blocks import file_of
    from shoal.checkpoint.loading import _reads, _wanted
    from shoal.checkpoint.manifest import decode, encode
    from shoal.checkpoint.names import Name
    from shoal.checkpoint.part import Part, decode_part, encode_part
    from shoal.checkpoint.publish import manifest_of
    from shoal.checkpoint.saving import contents_of

    shapes, took = shapes_of(model), {}
    with as_rank(world - 1, world):
        tensors = laid_out(shapes, world, tp)
        began_mb = peak_mb()
        with timed(took, "part"):
            contents = contents_of(tensors)
            contents.pieces  # noqa: B018  # derived when they are first asked for
            packed = contents.packed
    sizes, block_bytes = contents.layout.sizes(), contents.layout.block_bytes
    texts = []
    for rank in range(world):
        size = HEADER_BYTES + sizes.get(rank, 0)
        digests = os.urandom(16 * len(range(HEADER_BYTES, size, block_bytes)))
        texts.append(
            encode_part(Part(rank, world, file_of(size, HEADER_BYTES, "0" * 32, block_bytes, digests), packed))
        )
    forget_what_is_cached()
    with timed(took, "merge"):
        manifest = manifest_of(Name(*NAME), [decode_part(text) for text in texts], {})
    with timed(took, "encode"):
        data = encode(manifest)
    forget_what_is_cached()
    with timed(took, "decode"):
        decode(data)
    rows = sum(1 for name in manifest.tensors for _ in manifest.rows.slices(name)) if world <= 64 else None
    rows = rows or len(manifest.tensors) * world  # at most; a few last shards are empty
    for what, ranks in (("own", world), ("half", max(1, world // 2))):
        with as_rank(ranks - 1, ranks):
            mine = laid_out(shapes, ranks, tp)
            forget_what_is_cached()
            with timed(took, what):
                sent = decode(data, checked=True)
                _reads(sent, _wanted(sent, mine))
    seconds = " ".join(f"{took[what]:12.3f}" for what in ("part", "merge", "encode", "decode", "own", "half"))
    sizes_mb = f"{len(data) / 1e6:12.2f} {len(texts[-1]) / 1e6:12.4f}"
    print(f"{model:>12} {world:12d} {rows:12d} {sizes_mb} {seconds} {peak_mb() - began_mb:9.0f}")


def shapes_of(model: str) -> dict[str, tuple[int, ...]]:
    import torch

    from shoal.model.decoder import Decoder
    from shoal.spec.model import Model
    from shoal.spec.presets import preset
    from shoal.spec.shape import shape_of

    with torch.device("meta"):
        decoder = Decoder(shape_of(Model(**preset(model, "--models").model)))
    shapes = {f"model.{name}": tuple(p.shape) for name, p in decoder.named_parameters()}
    moments = {f"optim.{n.removeprefix('model.')}.{k}": s for n, s in shapes.items() for k in ("exp_avg", "exp_avg_sq")}
    return shapes | moments


def laid_out(shapes: dict[str, tuple[int, ...]], world: int, tp: int) -> dict[str, object]:
    """As FSDP2 does it; with tensor parallelism matrices are cut along one dimension or the other before that."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    tp = min(tp, world)
    mesh = init_device_mesh("cpu", (world // tp, tp) if tp > 1 else (world,))
    tensors = {}
    for i, (name, shape) in enumerate(shapes.items()):
        if tp == 1 or len(shape) < 2:
            cuts = [Shard(0)] if tp == 1 else [_StridedShard(0, split_factor=tp), Shard(0)]
        else:
            cuts = [_StridedShard(0, split_factor=tp), Shard(0)] if i % 2 else [Shard(0), Shard(1)]
        tensors[name] = _on_meta(shape, mesh, cuts)
    return tensors


def _on_meta(shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> Any:
    """What `distribute_tensor` gives, which takes torch 20 s for all strided shards of a thousand ranks."""
    import torch
    from torch.distributed.tensor import DTensor

    from shoal.checkpoint.grids import Cut, boxes_at

    cuts = tuple(Cut(p.dim, n, getattr(p, "split_factor", 1)) for p, n in zip(placements, mesh.shape, strict=True))
    place = 0
    for cut, index in zip(cuts, mesh.get_coordinate(), strict=True):
        place = place * cut.parts + index
    boxes = boxes_at(shape, cuts, place)
    ends = [tuple(start + n for start, n in zip(box.start, box.shape, strict=True)) for box in boxes]
    local = tuple(max(along) for along in zip(*ends, strict=True)) if boxes else (0, *shape[1:])
    whole = torch.empty(shape, device="meta")
    part = torch.empty(local, device="meta")
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextmanager
def timed(into: dict[str, float], what: str) -> Iterator[None]:
    began = time.process_time()
    yield
    into[what] = time.process_time() - began


def forget_what_is_cached() -> None:
    """Each step is another process's in truth."""
    from shoal.checkpoint import grids, part

    for cached in (grids.boxes_at, grids.count_at, grids._runs, grids._indices_in, part.unpack):
        cached.cache_clear()


if __name__ == "__main__":
    sys.exit(main())
