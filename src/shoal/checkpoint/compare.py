"""Where two checkpoints differ: tensors by their numbers, whatever mesh saved them, and what is written beside them.

Tensors that were cut alike and lie in blocks with the same checksums are equal, and are not read. Of the others a slice
at a time is in memory, never a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shoal.checkpoint.boxes import read_slice
from shoal.checkpoint.find import Found
from shoal.checkpoint.grids import Dims, intersect
from shoal.checkpoint.layout import view_of
from shoal.checkpoint.rows import Entry, Slice

# Numbers that are compared as float64 at a time: what a core's cache holds, and what torch does on one thread. Above
# it, on a machine that trains beside, threads wait for each other: 18 times slower (measured, 2 cores, load 15).
_AT_ONCE = 1 << 15
_TINY = torch.finfo(torch.float64).tiny
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Numbers:
    """How the numbers of one tensor differ. Bits are compared: 0.0 and -0.0 differ, a NaN equals the same NaN."""

    count: int  # that differ
    of: int
    max_abs: float  # of those where both are finite
    max_rel: float  # the same, divided by the larger of the two
    not_finite: int  # that differ, and one of the two is infinite or NaN


@dataclass(frozen=True)
class Changed:
    """A tensor that both have and that is not the same."""

    name: str
    kinds: tuple[str, str] | None  # dtypes and shapes, where these differ already
    numbers: Numbers | None


@dataclass(frozen=True)
class Fact:
    """A value of the manifest (`spec.…`, `environment.…`) that differs; None where one has none."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Comparison:
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: tuple[Changed, ...]
    equal: int
    facts: tuple[Fact, ...]

    @property
    def same(self) -> bool:
        """Whether the tensors are; a run on another machine has other facts and may have the same tensors."""
        return not (self.only_a or self.only_b or self.changed)


def compare(a: Found, b: Found, prefix: str = "", on_bytes: Callable[[int], None] = lambda n: None) -> Comparison:
    """Of the tensors whose names begin with `prefix`. A slice that is damaged is `Corrupt`."""
    of_a, of_b = (
        {name: entry for name, entry in found.manifest.tensors.items() if name.startswith(prefix)} for found in (a, b)
    )
    changed = []
    both = sorted(of_a.keys() & of_b.keys())
    for name in both:
        kinds = (_kind(of_a[name]), _kind(of_b[name]))
        if kinds[0] != kinds[1]:
            changed.append(Changed(name, kinds, None))
        elif _digests(a, name) != _digests(b, name):
            numbers = _numbers(a, b, name, on_bytes)
            if numbers.count:
                changed.append(Changed(name, None, numbers))
    only_a, only_b = sorted(of_a.keys() - of_b.keys()), sorted(of_b.keys() - of_a.keys())
    return Comparison(tuple(only_a), tuple(only_b), tuple(changed), len(both) - len(changed), _facts(a, b))


def _kind(entry: Entry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _digests(found: Found, name: str) -> set[tuple[Dims, Dims, tuple[tuple[int, int, str], ...]]]:
    """Which boxes it is cut into, and the blocks that hold each: their place beside it, their size, their checksum."""
    manifest, item_bytes = found.manifest, found.manifest.tensors[name].item_bytes
    digests = set()
    for s in manifest.rows.slices(name):
        blocks = manifest.files[s.file].blocks(s.at, s.at + math.prod(s.shape) * item_bytes)
        digests.add((s.offset, s.shape, tuple((at - s.at, count, digest) for at, count, digest in blocks)))
    return digests


def _numbers(a: Found, b: Found, name: str, on_bytes: Callable[[int], None]) -> Numbers:
    count = not_finite = 0
    max_abs = max_rel = 0.0
    for ours, theirs in _pairs(a, b, name):
        on_bytes(ours.nbytes)
        differ = ours.view(_BITS[ours.itemsize]) != theirs.view(_BITS[ours.itemsize])
        changed = int(differ.count_nonzero())
        if not changed:
            continue
        count += changed
        x, y = ours.double(), theirs.double()
        if not math.isfinite(float((x + y).sum())):  # something among them is infinite or NaN: look closer
            finite = x.isfinite() & y.isfinite()
            not_finite += int((differ & ~finite).count_nonzero())
            x, y = x[finite], y[finite]
        if x.numel():
            gap, larger = (x - y).abs_(), torch.maximum(x.abs_(), y.abs_())
            max_abs = max(max_abs, float(gap.max()))
            max_rel = max(max_rel, float(gap.div_(larger.clamp_(min=_TINY)).max()))
    return Numbers(count, math.prod(a.manifest.tensors[name].shape), max_abs, max_rel, not_finite)


def _pairs(a: Found, b: Found, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same numbers of both, a part of a slice at a time."""

    @lru_cache(maxsize=2)  # two meshes cut differently: the next slice of one often ends in the same slice of the other
    def of_b(s: Slice) -> torch.Tensor:
        return read_slice(b, name, s)

    for s in a.manifest.rows.slices(name):
        mine = read_slice(a, name, s)
        for other in b.manifest.rows.slices_in(name, s.offset, s.shape):
            shared = intersect(s.offset, s.shape, other.offset, other.shape)
            assert shared is not None
            at, shape = shared
            x = view_of(mine, _minus(at, s.offset), shape).reshape(-1)
            y = view_of(of_b(other), _minus(at, other.offset), shape).reshape(-1)
            yield from zip(x.split(_AT_ONCE), y.split(_AT_ONCE), strict=True)


def _minus(a: Dims, b: Dims) -> Dims:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _facts(a: Found, b: Found) -> tuple[Fact, ...]:
    of_a, of_b = dict(_flat(a.extra)), dict(_flat(b.extra))
    of_a |= {"step": a.step, "ranks": a.manifest.world}
    of_b |= {"step": b.step, "ranks": b.manifest.world}
    keys = dict.fromkeys([*of_a, *of_b])
    return tuple(Fact(key, of_a.get(key), of_b.get(key)) for key in keys if of_a.get(key) != of_b.get(key))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Sections opened up; a list is one value."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
