"""Which share of a run's time, and of its devices, makes steps that count. No torch.

Without islands every failure stops the whole run: the exact expression in shoal.plan.renewal says what is left. With
islands a failed device takes one of them away for a while and delays the others until they have missed it; only what
fails the run as a whole (the `job` term of the rate, or all islands at once) costs a restart from a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shoal.errors import SpecError
from shoal.plan.failures import HOUR_S, FailureRate
from shoal.plan.renewal import best_interval_s, comes_back, cycle, young_interval_s
from shoal.plan.restarts import Span, Style

SHORTEST_S, LONGEST_S = 1.0, 30 * 60.0  # between saves, where they cost nothing or failures are rare
# A machine that broke is back after a day; an assumption (minutes for a reset, days for a part).
REPAIR_S = 24 * 3600.0
WORTH = 0.001  # of goodput; less than this is no advice


@dataclass(frozen=True)
class Goodput:
    """Shares of the time of all devices. `parts` sum to 1; it lies between `low` and `high` with about 90%."""

    expected: float
    low: float
    high: float
    interval_s: float  # of steps between two saves
    young_s: float  # what Young's formula says about that
    mttf_s: float  # between failures, those that an island survives included
    parts: Mapping[str, float]
    spare_nodes: int
    advice: str  # which cost counts most

    def __str__(self) -> str:
        return f"{self.expected:.1%} ({self.low:.1%} to {self.high:.1%})"


def goodput(
    devices: int,
    per_node: int,
    rates: FailureRate,
    style: Style,
    checkpoint_write_s: float,
    checkpoint_blocking_s: float,
    interval: float | None = None,
    *,
    step_s: float = 0.0,
    maintenance: float = 0.0,
    stragglers: float = 0.0,
    spare_nodes: int | None = None,
) -> Goodput:
    """Of a run on so many devices; the interval between saves, and the number of spares, are the best unless given.

    `checkpoint_write_s` is from the moment that training stops for a save until it is safe, `checkpoint_blocking_s`
    what training waits for it. `maintenance` is the share of time in which the fleet is taken away by plan,
    `stragglers` the share by which the slowest hold up the others. `step_s` matters for islands: a part of the open
    step is computed twice.
    """
    if devices < style.islands * per_node:
        least = f"{style.islands} islands of at least one node of {per_node}"
        raise SpecError(f"{devices} devices are not enough for {least}; ask for fewer islands or another style.")
    if checkpoint_blocking_s > checkpoint_write_s:
        raise SpecError("a checkpoint cannot block training for longer than it takes until it is safe; swap the two.")
    if interval is not None and interval <= 0:
        raise SpecError(f"the interval between checkpoints is {interval:g} s; it has to be above 0.")
    job, device = rates.job_per_hour(devices) / HOUR_S, rates.device_per_hour(devices) / HOUR_S
    nodes = devices // per_node
    if not style.spares:
        spare_nodes = 0
    elif spare_nodes is None:
        most = rates.between(devices)[1] / rates.per_hour(devices)  # they are bought before the rate is known
        spare_nodes = best_spares(nodes, device * most * style.replace_share * REPAIR_S)
    case = _Case(
        job_rate=job,
        device_rate=device,
        detect_s=style.detect.s,
        restart_s=style.restart.s,
        load_s=style.load.s,
        replace_s=style.replace.s,
        replace_share=style.replace_share,
        write_s=checkpoint_write_s,
        blocking_s=checkpoint_blocking_s,
        given_s=interval,
        step_s=step_s,
        islands=style.islands,
        maintenance=maintenance,
        stragglers=stragglers,
        spares=spare_nodes if style.spares else None,
        nodes=nodes,
    )
    parts, whole = _parts(case), _whole_run_rate(case)
    low, high = _bounds(replace(case, given_s=case.interval_s), rates.between(devices), style)
    return Goodput(
        expected=parts["training"],
        low=low,
        high=high,
        interval_s=case.interval_s,
        young_s=young_interval_s(checkpoint_blocking_s, 1 / whole) if whole else LONGEST_S,
        mttf_s=rates.mttf_s(devices),
        parts=parts,
        spare_nodes=spare_nodes,
        advice=_advice(case),
    )


def best_spares(nodes: int, out: float) -> int:
    """Machines to hold ready: one too many idles all the time, one too few makes everybody wait for a repair."""

    def left(spares: int) -> float:
        return (1 - short_of_nodes(spares, out)) * nodes / (nodes + spares)

    spares = int(out)
    while left(spares + 1) > left(spares):
        spares += 1
    return spares


def short_of_nodes(spares: int, out: float) -> float:
    """Share of time in which more machines are in repair than stand by, when `out` are on average (Poisson)."""
    if not out:
        return 0.0
    enough = sum(math.exp(k * math.log(out) - out - math.lgamma(k + 1)) for k in range(spares + 1))
    return max(0.0, 1 - enough)


@dataclass(frozen=True)
class _Case:
    """All numbers of one evaluation, so that each can be moved alone."""

    job_rate: float  # a second
    device_rate: float
    detect_s: float
    restart_s: float
    load_s: float
    replace_s: float
    replace_share: float
    write_s: float
    blocking_s: float
    given_s: float | None  # between saves
    step_s: float
    islands: int
    maintenance: float
    stragglers: float
    spares: int | None
    nodes: int

    @property
    def interval_s(self) -> float:
        """The best where none is given; a save begins only when the last one is safe."""
        if self.given_s is not None:
            return self.given_s
        rate, shortest = _whole_run_rate(self), max(SHORTEST_S, self.write_s - self.blocking_s)
        return max(shortest, best_interval_s(self.blocking_s, 1 / rate) if rate else LONGEST_S)

    @property
    def downs(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Shares of the failures, and how long coming back from them takes."""
        back_s = self.restart_s + self.load_s
        return (1 - self.replace_share, back_s), (self.replace_share, back_s + self.replace_s)


def _parts(case: _Case) -> dict[str, float]:
    """Where the time goes."""
    late_s = max(0.0, case.write_s - case.blocking_s)
    # With islands it is software that stops all of them, and no machine has to be replaced.
    downs = case.downs if case.islands == 1 else ((1.0, case.restart_s + case.load_s),)
    got = cycle(_whole_run_rate(case), case.interval_s, case.blocking_s, late_s, case.detect_s, downs)
    parts = {"training": got.training, "checkpoint": got.checkpoint, "lost work": got.lost, "detection": got.detection}
    mean_s = {"restart": case.restart_s, "loading": case.load_s}
    if case.islands == 1:
        mean_s["waiting for a machine"] = case.replace_share * case.replace_s
    all_s = sum(mean_s.values())
    parts |= {name: got.coming_back * down_s / all_s if all_s else 0.0 for name, down_s in mean_s.items()}
    if case.islands > 1:
        up, delayed = _island_up(case), _delayed(case)
        parts["islands away"] = parts["training"] * (1 - up)
        parts["detection"] += parts["training"] * up * delayed
        parts["training"] *= up * (1 - delayed)
    parts["stragglers"] = parts["training"] * case.stragglers
    parts["training"] *= 1 - case.stragglers
    for name, share in (("maintenance", case.maintenance), ("spares", _for_spares(case))):
        parts = {key: part * (1 - share) for key, part in parts.items()} | {name: share}
    return {key: part for key, part in parts.items() if part or key == "training"}


def _whole_run_rate(case: _Case) -> float:
    """Of what makes the whole run start again, a second."""
    if case.islands == 1:
        return case.job_rate + case.device_rate
    up = _island_up(case)
    return case.job_rate + up * case.device_rate * (1 - up) ** (case.islands - 1)


def _island_up(case: _Case) -> float:
    """Share of time in which an island takes part: a run's cycle, with the others for its checkpoint."""
    rate = case.device_rate / case.islands
    return comes_back(rate, case.downs) / (1 + rate * case.detect_s)


def _delayed(case: _Case) -> float:
    """Share of time in which one waits until others that were lost are missed and their part of the step is done.

    That is when any of them failed within this time; those that fail together are missed together.
    """
    others = (case.islands - 1) / case.islands * case.device_rate * _island_up(case)
    return -math.expm1(-others * (case.detect_s + case.step_s / case.islands))


def _for_spares(case: _Case) -> float:
    """Idle spares, and everybody's time when there are too few."""
    if case.spares is None:
        return 0.0
    short = short_of_nodes(case.spares, case.device_rate * case.replace_share * REPAIR_S)
    return 1 - (1 - short) * case.nodes / (case.nodes + case.spares)


def _bounds(case: _Case, between: tuple[float, float], style: Style) -> tuple[float, float]:
    """Each uncertain number moved alone; the changes add up as independent ones do, by their squares."""
    expected = _parts(case)["training"]
    down = up = 0.0
    for cases in _moved(case, between, style):
        changes = [_parts(c)["training"] - expected for c in cases]
        down += min(0.0, *changes) ** 2
        up += max(0.0, *changes) ** 2
    return max(0.0, expected - math.sqrt(down)), min(1.0, expected + math.sqrt(up))


def _moved(case: _Case, between: tuple[float, float], style: Style) -> Iterator[tuple[_Case, _Case]]:
    rate = (case.job_rate + case.device_rate) * HOUR_S
    if rate:
        few, many = (
            replace(case, job_rate=case.job_rate * to / rate, device_rate=case.device_rate * to / rate)
            for to in between
        )
        yield few, many
    spans: dict[str, Span] = {
        "detect_s": style.detect,
        "restart_s": style.restart,
        "load_s": style.load,
        "replace_s": style.replace,
    }
    for name, span in spans.items():
        yield _with(case, name, span.low_s), _with(case, name, span.high_s)


# What one could shorten. That fewer failures would help is always true and no advice.
_COSTS = {
    "detect_s": "noticing a failure",
    "restart_s": "starting processes again",
    "load_s": "loading the state",
    "replace_s": "waiting for another machine",
    "blocking_s": "waiting for a checkpoint",
    "write_s": "writing a checkpoint",
    "given_s": "the work between two checkpoints",
    "stragglers": "waiting for stragglers",
    "maintenance": "maintenance",
}


def _advice(case: _Case) -> str:
    """The cost that would raise goodput most if it were half of what it is."""
    now = _parts(case)["training"]
    gains = {name: _parts(half)["training"] - now for name in _COSTS if (half := _halved(case, name)) is not None}
    best = max(gains, key=lambda name: gains[name], default=None)
    if best is None or gains[best] < WORTH:
        return f"no single cost, halved, would raise goodput by {WORTH:.1%}"
    cost = getattr(case, best)
    size = f"{cost:.1%} of the time" if best in ("stragglers", "maintenance") else f"{cost:.3g} s"
    return (
        f"{_COSTS[best]} counts most ({size}): half of it would raise goodput from {now:.1%} to {now + gains[best]:.1%}"
    )


def _halved(case: _Case, name: str) -> _Case | None:
    value = getattr(case, name)
    if not value:
        return None
    half = _with(case, name, value / 2)
    return replace(half, write_s=max(half.write_s, half.blocking_s))


def _with(case: _Case, name: str, value: float) -> _Case:
    return replace(case, **{name: value})  # type: ignore[arg-type]  # names of its floats
