"""Plain sentences about a run: what it waits for or does, its evaluation, what ended it last, what it has cost."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal import readable
from shoal.errors import TRANSIENT, WRONG_ENVIRONMENT, WRONG_USAGE
from shoal.journal.journal import Record
from shoal.journal.reading import Told, told_of
from shoal.journal.tail import REMARKS
from shoal.launch.price import Stated, price
from shoal.observe import evaluations
from shoal.observe.causes import advice_of
from shoal.observe.status import Status
from shoal.observe.time_ledger import NEEDED, Ledger, ledger

if TYPE_CHECKING:
    from shoal.launch.backend import State
    from shoal.launch.watch import Seen

STUCK_S = 600.0  # a live run that says nothing for so long is worth a look
LOOPS = 3  # restarts by the scheduler without an end
BY_CODE = {WRONG_USAGE: "user-error", WRONG_ENVIRONMENT: "environment", TRANSIENT: "crash-looping"}


@dataclass(frozen=True)
class Cost:
    node_hours: float
    gpu_hours: float
    usd: float | None
    goodput: float | None  # None where the journal is out of sight
    price: str | None = None  # of one device and hour, in words

    def __str__(self) -> str:
        if not self.node_hours:
            return "nothing yet: it has not started"
        spent = [f"{self.node_hours:.3g} node-hours"]
        if self.gpu_hours:
            spent.append(f"{self.gpu_hours:.3g} GPU-hours")
        if self.usd is not None:
            spent.append(f"about ${self.usd:,.2f} at {self.price}")
        good = "" if self.goodput is None else f"; goodput {readable.percent(self.goodput)}"
        return ", ".join(spent) + good


@dataclass(frozen=True)
class Answer:
    now: str
    died: str | None
    cost: Cost
    slow: str | None = None  # whom the others wait for
    evaluation: Record | None = None  # the newest

    def __str__(self) -> str:
        died = self.died or "it has not died so far"
        slow = f"\nstraggler  {self.slow}" if self.slow else ""
        return f"now        {self.now}{slow}{self._evaluated()}\nlast end   {died}\ncost       {self.cost}"

    def _evaluated(self) -> str:
        """Of each set, where there are several; one is in the report."""
        if self.evaluation is None or not self.evaluation.get("sets"):
            return ""
        mean = f"{readable.number(self.evaluation['loss'])}{evaluations.precision(self.evaluation)}"
        lines = [f"\nevaluation {mean} at step {self.evaluation['step']}", *evaluations.table(self.evaluation)]
        return "\n           ".join(lines)

    def as_json(self) -> dict[str, Any]:
        cost = {k: getattr(self.cost, k) for k in ("node_hours", "gpu_hours", "usd", "goodput")}
        found = self.evaluation
        evaluated = None if found is None else {k: found.get(k) for k in ("step", "loss", "precision", "sets")}
        return {"now": self.now, "died": self.died, "cost": cost, "straggler": self.slow, "evaluation": evaluated}


def answer(
    status: Status,
    seen: Seen | None,
    records: Told | Iterable[Record],
    said: Stated | None,
    now: float | None = None,
) -> Answer:
    """`records` is the journal, `said` the run file about its price; empty and None where they are out of sight."""
    now = time.time() if now is None else now
    told = told_of(records)
    died = _died(seen, told)
    slow = _slow(told) if status.status == "running" else None
    cost = _cost(status, seen, told, said, now)
    return Answer(_now(status, seen, now, died is not None), died, cost, slow, told.newest("eval"))


def _slow(told: Told) -> str | None:
    """The newest word on it, of the present attempt."""
    for _, record in reversed(told.others(NEEDED)):
        if record["kind"] == "attempt":
            return None
        if record["kind"] == "straggler":
            return f"{_when(record)}{readable.straggler(record)}{_see('straggler')}"
    return None


def _now(status: Status, seen: Seen | None, now: float, told_below: bool) -> str:
    where = "" if seen is None else f" on {seen.on}"
    step = f" at step {status.step}" + (f" of {status.total}" if status.total else "") if status.step else ""
    hint = ""
    if status.status == "waiting":
        hint = _see("pending")
    elif status.status == "running" and status.step and now - status.updated > STUCK_S:
        hint = _see("stuck")
    elif status.status in ("starting", "running") and seen is not None and not status.step:
        hint = _see("crash-looping") if seen.state.restarts >= LOOPS else ""
    # What a run died of is said once, with what to do about it, in the line of its last end.
    why = "" if told_below and status.status == "failed" else f": {status.why}"
    return f"{status.status}{where}{step}{why}{hint}"


def _died(seen: Seen | None, told: Told) -> str | None:
    """By the journal, which knows the cause; by the scheduler where nobody came to write it down."""
    others = told.others(NEEDED)
    own = _last_end([record for _, record in others])
    if seen is not None and seen.state.phase in ("failed", "gone"):
        place, last = next(((p, r) for p, r in reversed(others) if r["kind"] not in REMARKS), (0, {}))
        if place < told.rows or last.get("kind") != "close" or float(last["t"]) < seen.job.submitted:
            return _by_scheduler(seen.state, seen.job.backend)
    return own


def _last_end(told: list[Record]) -> str | None:
    ended: Record | None = None  # a session that closed as failed: a failure before it says more
    for record in reversed(told):
        match record.get("kind"):
            case "failure":
                return _by_journal(record, any("script" in r for r in told if r.get("kind") == "start"))
            case "close" if record.get("status") == "stopped":
                return f"{_when(record)}{record.get('reason')}{_see('preempted')}"
            case "close" if record.get("status") == "failed":
                ended = ended or record
            case "open" if ended is not None:
                break
    if ended is None:
        return None
    return f"{_when(ended)}{ended.get('reason')}{_see(BY_CODE.get(int(ended['exit_code']), 'unknown'))}"


def _by_journal(record: Record, script: bool) -> str:
    cause = str(record.get("cause") or "unknown")
    advice = advice_of(cause, script) or "read its log"
    return f"{_when(record)}{readable.failure(record)}: {advice}{_see(cause)}"


def _by_scheduler(state: State, name: str) -> str:
    if state.phase == "gone":
        return f"{name} says: {state.why}{_see('supervisor-lost')}"
    runbook = "crash-looping" if state.restarts >= LOOPS else BY_CODE.get(state.exit_code or 0, "unknown")
    return f"{name} says: {state.why}{_see(runbook)}"


def _see(runbook: str) -> str:
    return f" (docs/runbooks/{runbook}.md)"


def _when(record: Record) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(float(record['t'])))} "


def _cost(status: Status, seen: Seen | None, told: Told, said: Stated | None, now: float) -> Cost:
    accounts: Ledger | None = None
    if not told.empty:
        accounts = ledger(told, now if status.status == "running" else None)
    hours = (accounts.total_s if accounts else 0.0 if seen is None else _since_start_s(seen.state, now)) / 3600
    nodes = 1 if seen is None else seen.job.nodes
    start: Record = next((r for _, r in reversed(told.others(NEEDED)) if r["kind"] == "start"), {})
    device = str(start.get("device", "cpu"))
    gpus = seen.job.gpus if seen is not None else int(start.get("world", 0)) if device != "cpu" else 0
    devices = gpus or (1 if said is not None and said.usd_per_hour else 0)  # a price of a CPU is that of its node
    usd, by = (None, None) if said is None or not devices else price(said, device)
    dollars = None if usd is None else usd * devices * nodes * hours
    return Cost(nodes * hours, nodes * gpus * hours, dollars, accounts.goodput if accounts else None, by)


def _since_start_s(state: State, now: float) -> float:
    return 0.0 if state.started is None else max(0.0, (state.ended or now) - state.started)
