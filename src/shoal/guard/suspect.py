"""Of ranks that all stand still: which of them the others wait for, and what shows it. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal.observe.pulse import Sample

STALE_S = 4.0  # a thread that writes every second and has not for so long cannot get at the interpreter
# A rank whose innermost Python frame is here waits for others, or for the device …
_WAITING = ("torch/distributed/", "torch/autograd/graph.py", "torch/cuda/")
# … and here it may use a whole core to do so: NCCL and CUDA ask again and again whether it is done. (gloo sleeps.)
_SPINNING = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/_functional_collectives.py",
    "torch/cuda/",
)


class Seen(Protocol):
    """What is known of a rank."""

    @property
    def marks(self) -> int: ...
    @property
    def sample(self) -> Sample | None: ...


@dataclass(frozen=True)
class Suspects:
    rank: int  # the one to name
    among: tuple[int, ...]  # it is one of these; if one of them is at work, then the others wait for that one
    why: str


def suspects(ranks: Mapping[int, Seen], now: float) -> Suspects:
    if len(ranks) == 1:
        rank = next(iter(ranks))
        return Suspects(rank, (rank,), "it is the only one")
    fewest = min(r.marks for r in ranks.values())
    left = tuple(rank for rank, r in ranks.items() if r.marks == fewest)
    if len(left) == 1:
        return Suspects(left[0], left, "it has made less progress than all others")
    waited_for = _waited_for(ranks)
    if behind := tuple(rank for rank in left if rank in waited_for):
        group, number = waited_for[behind[0]]
        return Suspects(behind[0], behind, f"it has not begun collective {number} of {group}, where another waits")
    # From here on it is a guess who of them it is.
    if stale := [rank for rank in left if _stale(ranks[rank].sample, now)]:
        return Suspects(stale[0], left, "no other thread of it can run")
    if elsewhere := [rank for rank in left if not _is_in(ranks[rank].sample, _WAITING, unknown=True)]:
        return Suspects(elsewhere[0], left, "it is in no collective")
    return Suspects(left[0], left, "all ranks wait at the same place, none is behind: look at the network between them")


def may_spin(sample: Sample | None) -> bool:
    """Whether the CPU time of this rank may be that of a wait."""
    return _is_in(sample, _SPINNING, unknown=False)


def waiting_in(sample: Sample | None) -> str:
    """The call that a rank waits in: of the torch function nearest to our code, and our line."""
    if sample is None or not sample.stack:
        return ""
    ours = next((i for i, frame in enumerate(sample.stack) if frame.startswith("shoal/")), None)
    if ours is None:
        return sample.stack[0]
    called = _functions(reversed(sample.stack[:ours]))
    return f"{called} at {_line(sample.stack[ours])}" if called else _line(sample.stack[ours])


def _waited_for(ranks: Mapping[int, Seen]) -> dict[int, tuple[str, int]]:
    """Ranks that others wait for and that wait for nobody: (group, the collective that they have not begun)."""
    groups = {rank: r.sample.groups if r.sample else {} for rank, r in ranks.items()}
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    for mine in groups.values():
        for name, begun in mine.items():
            least[name] = min(begun, least.get(name, begun))
            most[name] = max(begun, most.get(name, begun))
    found: dict[int, tuple[str, int]] = {}
    for rank, mine in groups.items():
        if any(begun > least[name] for name, begun in mine.items()):
            continue  # it waits itself
        if ahead := [(most[name], name) for name, begun in mine.items() if most[name] > begun]:
            number, name = max(ahead)
            found[rank] = (f"group {name.split('/')[0]}", number)
    return found


def _stale(sample: Sample | None, now: float) -> bool:
    return sample is not None and now - sample.t > STALE_S


def _is_in(sample: Sample | None, files: tuple[str, ...], unknown: bool) -> bool:
    return unknown if sample is None or not sample.stack else sample.stack[0].startswith(files)


def _functions(frames: Iterable[str]) -> str:
    return next((name for f in frames if (name := f.rsplit(" ", 1)[1]) not in ("wrapper", "_fn", "inner")), "")


def _line(frame: str) -> str:
    return frame.rsplit(" ", 1)[0]
