"""One sentence: what would raise a run's goodput the most, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal import readable
from shoal.observe.causes import FROM_OUTSIDE, advice_of
from shoal.observe.history import History, speed
from shoal.observe.throughput import duration_s
from shoal.observe.time_ledger import Ledger

WORTH = 0.01  # of the time; less than this is no advice


@dataclass(frozen=True)
class Advice:
    part: str
    saves_s: float
    sentence: str


def advice(ledger: Ledger, found: History) -> Advice | None:
    """The one that saves most; None where nothing would save a hundredth of the time."""
    total_s = ledger.total_s
    if not total_s:
        return None
    candidates = [*_faults(ledger, found), *_others(ledger, found)]
    best = max(candidates, key=lambda a: a.saves_s, default=None)
    return best if best is not None and best.saves_s >= WORTH * total_s else None


def _faults(ledger: Ledger, found: History) -> Iterator[Advice]:
    """By cause: what is to be mended is said so; islands help where there is nothing to mend."""
    costs = [cost for cost in ledger.costs if cost.total_us]
    if not costs:
        return
    if found.epochs:  # in island mode the others did not restart: only fewer faults are better
        worst = max({c.fault.cause for c in costs}, key=lambda cause: _spent_s(ledger, cause))
        yield _mend(ledger, worst, len(costs), sum(cost.total_us for cost in costs) / 1e6)
        return
    several = int(found.start.get("world", 1)) > 1 and not found.script
    if several and (outside := [cost for cost in costs if cost.fault.cause in FROM_OUTSIDE]):
        spent_s = sum(cost.total_us for cost in outside) / 1e6
        step_s = usual.step_s if (usual := speed(found)) else 0.0
        saved = max(0.0, spent_s - len(outside) * step_s)
        share, many = readable.percent(spent_s / ledger.total_s, 0), _failures(len(outside))
        sentence = f"Restarts cost {share} of the time ({many}): with islands (fleet.islands) the others would not "
        yield Advice("recovery", saved, f"{sentence}restart, which saves about {readable.duration(saved)}.")
    for cause in sorted({cost.fault.cause for cost in costs} - set(FROM_OUTSIDE)):
        yield _mend(
            ledger,
            cause,
            sum(cost.fault.cause == cause for cost in costs),
            _spent_s(ledger, cause),
            found.script is not None,
        )
    lost_s = sum(cost.lost_us for cost in costs) / 1e6
    saved = lost_s / 2
    sentence = f"Work that was lost and done again cost {readable.percent(lost_s / ledger.total_s, 0)} of the time: "
    by = "the script" if found.script else "checkpoint.every"
    how = f"saving twice as often ({by}) saves about {readable.duration(saved)}."
    yield Advice("lost", saved, sentence + how)


def _mend(ledger: Ledger, cause: str, many: int, spent_s: float, script: bool = False) -> Advice:
    """`many` failures have cost `spent_s`; those of this class would not come again if its cause were mended."""
    saved, share = _spent_s(ledger, cause), readable.percent(spent_s / ledger.total_s, 0)
    what = advice_of(cause, script) or "see what is known of it"
    sentence = f"{_failures(many)} cost {share} of the time; without those of class '{cause}' it would be about "
    return Advice("recovery", saved, f"{sentence}{readable.duration(saved)} less: {what} (docs/runbooks/{cause}.md).")


def _failures(many: int) -> str:
    return f"{many} failure{'s' * (many > 1)}"


def _spent_s(ledger: Ledger, cause: str) -> float:
    return sum(cost.total_us for cost in ledger.costs if cost.fault.cause == cause) / 1e6


def _others(ledger: Ledger, found: History) -> Iterator[Advice]:
    def tell(part: str, what: str, how: str, share_saved: float = 1.0, needed_s: float = 0.0) -> Advice:
        spent_s = max(0.0, ledger.seconds(part) - needed_s)
        saved_s = spent_s * share_saved
        share = readable.percent(spent_s / ledger.total_s, 0)
        return Advice(
            part, saved_s, f"{what} cost {share} of the time: {how} saves about {readable.duration(saved_s)}."
        )

    yield tell("data_wait", "Waiting for data", "shards on a disk of this machine (data.cache_dir for remote ones)")
    yield tell("evaluation", "Evaluation", "half as often, or on half the windows (eval.every, eval.windows),", 0.5)
    # The last save of a session is made however rarely others are, and it is waited for: no advice is about it.
    last_s = sum(duration_s(record) for record in found.last_saves)
    others = [c for c in found.checkpoints if not any(c is last for last in found.last_saves)]
    waited = [float(c.get("stall_s") or 0) > 0.5 * float(c.get("persist_s") or 0) for c in others]
    if waited and all(waited):
        yield tell("checkpoint", "Saving", "in the background (checkpoint.background: true) it", 0.9, last_s)
    else:
        yield tell("checkpoint", "Waiting for saves", "half as many (checkpoint.every)", 0.5, last_s)
    if ledger.sessions > 1:
        again = 1 - 1 / ledger.sessions
        how = f"one session instead of {ledger.sessions}"
        yield tell("startup", "Starting", how, again)
        yield tell("stopping", "Stopping", how, again)
