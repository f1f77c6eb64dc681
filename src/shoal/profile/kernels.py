"""Kernels with the same name and shapes taken together, and how near each comes to the roof."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.profile.least_work import Work, shapes, work
from shoal.profile.machine import Roof
from shoal.profile.tally import Call, Tally
from shoal.profile.trace import Event

UNKNOWN_SHARE = 0.5  # of the roof, to rank a kernel whose work is not known among the others
MOST_SHAPES = 3


@dataclass(frozen=True)
class Kernel:
    name: str
    operator: str
    shapes: str
    kind: str
    calls: float  # a step
    seconds: float  # a step
    share: float | None  # of the roof; above 1 where caches gave what was counted as memory
    bound: str | None  # compute or memory
    achieved: float | None  # FLOP/s or bytes/s
    roof: float | None
    precision: str | None

    @property
    def lost_s(self) -> float:
        """A step; what it would save at the roof."""
        share = UNKNOWN_SHARE if self.share is None else min(1.0, self.share)
        return self.seconds * (1 - share)


def kernels(tally: Tally, roof: Roof, attended: float | None = None) -> list[Kernel]:
    """The one that loses most first. `attended`: of attention's square, what packed documents left to compute."""
    grouped: dict[tuple[str, str, str], list[Call]] = defaultdict(list)
    for call in tally.calls:
        signature = _signature(call.operator) if call.operator is not None else ""
        grouped[call.name, call.kind, signature].append(call)
    found = (_kernel(calls, tally.steps, roof, signature, attended) for (*_, signature), calls in grouped.items())
    return sorted(found, key=lambda kernel: -kernel.lost_s)


def _kernel(calls: Sequence[Call], steps: int, roof: Roof, signature: str, attended: float | None) -> Kernel:
    first = calls[0]
    seconds = sum(call.ns for call in calls) / 1e9
    done = _work(calls, attended)
    least = roof.least_s(done) if done is not None else None
    bound = achieved = at_most = share = None
    if done is not None and least and seconds:
        bound, share = roof.bound(done), least / seconds
        achieved = (done.flops if bound == "compute" else done.bytes) / seconds
        at_most = roof.rate(done.precision) if bound == "compute" else roof.bandwidth
    return Kernel(
        name=first.name,
        operator=first.operator.name if first.operator is not None else "",
        shapes=signature,
        kind=first.kind,
        calls=len(calls) / steps,
        seconds=seconds / steps,
        share=share,
        bound=bound,
        achieved=achieved,
        roof=at_most,
        precision=done.precision if done is not None else None,
    )


def _work(calls: Iterable[Call], attended: float | None) -> Work | None:
    """Of all calls together; None where one is not known, or a kernel beside this one does its operator's work."""
    flops = moved = 0.0
    precision = ""
    for call in calls:
        one = work(call.operator, attended) if call.operator is not None and call.leads else None
        if one is None:
            return None
        flops, moved, precision = flops + one.flops, moved + one.bytes, one.precision
    return Work(flops, moved, precision)


def _signature(operator: Event) -> str:
    """The largest of its tensors, as 8192x2048 bf16."""
    found = shapes(operator)
    largest = sorted(found, key=lambda one: -_elements(one[0]))[:MOST_SHAPES]
    kept = [one for one in found if one in largest][:MOST_SHAPES]
    more = f" and {len(found) - len(kept)} more" if len(found) > MOST_SHAPES else ""
    types = {short_type(type_) for _, type_ in kept}
    named = f" {types.pop()}" if len(types) == 1 else ""
    return " ".join("x".join(map(str, dims)) for dims, _ in kept) + named + more


def short_type(type_: str) -> str:
    short = {"c10::bfloat16": "bf16", "c10::half": "fp16", "float": "fp32", "tensorlist": "", "genericlist": ""}
    plain = type_.lower().replace(" ", "")
    return short.get(plain, plain.removeprefix("c10::").replace("float8_", ""))


def short_name(name: str) -> str:
    """Without return type, template arguments and parameters: `void at::native::f<…>(…)` is at::native::f."""
    if "::" not in name and "<" not in name:
        return name
    text = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth, kept = 0, []
    for c in text:
        depth += c in "<("
        if not depth:
            kept.append(c)
        depth -= c in ">)"
    plain = "".join("".join(kept).split())
    return plain or text


def _elements(dims: Sequence[int]) -> int:
    n = 1
    for d in dims:
        n *= d
    return n
