"""Of ranks that all stand still: which of them the others wait for, and what shows it. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.journal.pulse_file import Groups, Sample

ELSEWHERE = "it is in no collective"
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


@dataclass(frozen=True)
class Suspects:
    """Ranks are told by their position."""

    among: tuple[int, ...]  # it is one of these; if one of them is at work, then the others wait for that one
    why: str = ""  # the first of them is to be named; empty: it is a guess which one, see `named`


WaitedFor = dict[int, tuple[str, int]]  # who → (group, the collective that it has not begun)


def suspects(marks: NDArray[np.int64], waited_for: WaitedFor) -> Suspects:
    """`waited_for` as below."""
    if len(marks) == 1:
        return Suspects((0,), "it is the only one")
    left = tuple(np.flatnonzero(marks == marks.min()).tolist())
    if len(left) == 1:
        return Suspects(left, "it has made less progress than all others")
    if waited_for and (behind := tuple(i for i in left if i in waited_for)):
        group, number = waited_for[behind[0]]
        return Suspects(behind, f"it has not begun collective {number} of {group}, where another waits")
    return Suspects(left)


def named(found: Suspects, samples: Sequence[Sample | None], now: float) -> tuple[int, str]:
    """Which of them it is, and why. A guess looks at all of them, so it is for when somebody is to be named."""
    left = found.among
    if found.why:
        return left[0], found.why
    if (stale := next((i for i in left if _stale(samples[i], now)), None)) is not None:
        return stale, "no other thread of it can run"
    if (elsewhere := next((i for i in left if in_no_collective(samples[i])), None)) is not None:
        return elsewhere, ELSEWHERE
    return left[0], "all ranks wait at the same place, none is behind: look at the network between them"


def waited_for(groups: Sequence[Groups]) -> WaitedFor:
    """Of members of these groups, those that others wait for and that wait for nobody."""
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    for mine in groups:
        for name, begun in mine.items():
            if begun < least.get(name, begun + 1):
                least[name] = begun
            if begun > most.get(name, begun - 1):
                most[name] = begun
    apart = {name for name, begun in least.items() if most[name] > begun}
    found: WaitedFor = {}
    if not apart:
        return found
    for i, mine in enumerate(groups):
        if any(name in apart and begun > least[name] for name, begun in mine.items()):
            continue  # it waits itself
        if ahead := [(most[name], name) for name, begun in mine.items() if most[name] > begun]:
            number, name = max(ahead)
            found[i] = (f"group {name.split('/')[0]}", number)
    return found


def in_no_collective(sample: Sample | None) -> bool:
    return not _is_in(sample, _WAITING, unknown=True)


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


def _stale(sample: Sample | None, now: float) -> bool:
    return sample is not None and now - sample.t > STALE_S


def _is_in(sample: Sample | None, files: tuple[str, ...], unknown: bool) -> bool:
    return unknown if sample is None or not sample.stack else sample.stack[0].startswith(files)


def _functions(frames: Iterable[str]) -> str:
    return next((name for f in frames if (name := f.rsplit(" ", 1)[1]) not in ("wrapper", "_fn", "inner")), "")


def _line(frame: str) -> str:
    return frame.rsplit(" ", 1)[0]
