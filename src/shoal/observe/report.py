"""A run in one page: what it was, how it ended, where the time went, how fast it was, what it learned."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal import readable
from shoal.journal.reading import told
from shoal.journal.record import Odd
from shoal.journal.rundir import RunDir
from shoal.observe import evaluations, planned, router, tasks, traffic
from shoal.observe.advice import Advice, advice
from shoal.observe.curves import draw
from shoal.observe.faults import Cost
from shoal.observe.history import History, Speed, history, speed
from shoal.observe.planned import Compared, compared
from shoal.observe.plot import plot, shown
from shoal.observe.status import Status, status_of
from shoal.observe.throughput import CONVENTION
from shoal.observe.time_ledger import PARTS, Ledger, ledger
from shoal.plain_file import read_object

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
MOST_FAILURES = 20  # on the page; --json has them all
MOST_STRAGGLERS = 3
MOST_SAMPLES = 8


@dataclass(frozen=True)
class Report:
    run_dir: RunDir
    identity: str
    status: Status
    ledger: Ledger
    history: History
    speed: Speed | None
    advice: Advice | None
    planned: Compared | str | None
    pictures: list[Path]
    odd: Odd = field(default_factory=Odd)  # lines of the journal that are no records
    undrawn: str | None = None  # why there are no pictures


def report(run_dir: RunDir, pictures: bool = True) -> Report:
    known = told(run_dir.journal_file)
    status = status_of(run_dir)
    found = history(known)
    identity = _identity(run_dir, found)
    made, undrawn = [], None
    if pictures:
        try:
            made = draw(found, run_dir.name, identity, run_dir.report)
        except OSError as e:  # somebody else's run, or a full disk: what there is to read can be read all the same
            undrawn = f"no pictures: {nearby(Path(e.filename or run_dir.report))} cannot be written ({e.strerror})"
    # While it runs, the time since the last record is part of it.
    accounts = ledger(known, time.time() if status.status == "running" else None)
    beside, said = compared(run_dir, found.steps, found.starts), advice(accounts, found)
    return Report(run_dir, identity, status, accounts, found, speed(found), said, beside, made, known.odd, undrawn)


def as_json(r: Report) -> dict[str, Any]:
    best = best_eval(r.history)
    return {
        **r.status.as_json(),
        "identity": r.identity,
        "notes": readable.notes(r.history.start),
        "sessions": r.history.sessions,
        "attempts": len(r.history.starts),
        "ledger": {
            "total_s": r.ledger.total_s,
            "parts_s": {part: r.ledger.seconds(part) for part in PARTS},
            "between_sessions_s": r.ledger.between_us / 1e6,
            "goodput": r.ledger.goodput,
        },
        "failures": r.history.failures,
        "failure_costs": [cost.as_json() for cost in r.ledger.costs],
        "failure_classes": _classes(r.ledger.costs),
        "advice": None if r.advice is None else asdict(r.advice),
        "epochs": r.history.epochs,
        "warnings": [*r.history.warnings, *([f"{r.odd}."] if r.odd.count else [])],
        "stragglers": r.history.stragglers,
        "lost_steps": len(r.history.lost),
        "speed": None if r.speed is None else {**asdict(r.speed), "mfu_convention": CONVENTION},
        "plan": r.planned.as_json() if isinstance(r.planned, Compared) else r.planned,
        "final_loss": readable.json_number(r.history.steps.last("loss")) if len(r.history.steps) else None,
        "final_eval_loss": readable.json_number(r.history.evals[-1]["loss"]) if r.history.evals else None,
        "final_eval_sets": r.history.evals[-1].get("sets") if r.history.evals else None,
        "tasks": [
            {**asdict(one), "points": [_finite(asdict(point)) for point in one.points]}
            for one in tasks.series(r.history.tasks)
        ],
        "samples": [{"step": one["step"], "texts": one["texts"]} for one in r.history.samples],
        "best_eval_loss": None if best is None else {"step": best[0], "loss": best[1]},
        "router": r.history.router,
        "checkpoints": [
            {k: c.get(k) for k in ("step", "bytes", "path", "stall_s", "persist_s")} for c in r.history.checkpoints
        ],
        "checkpoints_failed": r.history.checkpoints_failed,
        "traffic": traffic.newest(r.history.traffic),
        "digest": r.history.digest,
        "pictures": [str(p) for p in r.pictures],
    }


def as_text(r: Report) -> str:
    sections = [
        f"{r.run_dir.name}: {r.identity}\n{r.status.status}: {r.status.why}",
        "\n".join(f"note: {text}" for text in readable.notes(r.history.start)),
        f"the journal is damaged: {r.odd}." if r.odd.count else "",
        _time(r),
        _failures(r),
        _results(r),
        _tasks(r.history),
        "\n".join(traffic.lines(r.history.traffic)),
        *_curves(r.history),
        r.undrawn or "\n".join(f"drawn: {nearby(path)}" for path in r.pictures),
    ]
    return "\n\n".join(section for section in sections if section)


def _time(r: Report) -> str:
    total = r.ledger.total_us or 1
    lines = [f"where {readable.duration(r.ledger.total_s)} went"]
    for part, meaning in PARTS.items():
        us = r.ledger.parts_us[part]
        if us:
            name = part.replace("_", " ")
            lines.append(f"  {name:<11} {readable.duration(us / 1e6):>10} {readable.percent(us / total):>7}  {meaning}")
    lines.append(f"  {'total':<11} {readable.duration(r.ledger.total_s):>10} {readable.percent(1.0):>7}")
    lines.append(f"  goodput {readable.percent(r.ledger.goodput)} (training / total)")
    if r.advice:
        lines.append(f"  {r.advice.sentence}")
    if r.ledger.between_us:
        between = readable.duration(r.ledger.between_us / 1e6)
        lines.append(f"  not counted: {between} between {r.ledger.sessions} sessions, when nobody was running")
    return "\n".join(lines)


def _failures(r: Report) -> str:
    costs, lost = r.ledger.costs, len(r.history.lost)
    if not costs:
        return ""
    again = f", {lost} steps done again" if lost else ""
    lines = [f"{len(costs)} failure{'s' if len(costs) > 1 else ''}{again}"]
    for cost in costs[-MOST_FAILURES:]:
        lines += [f"  {_who(cost)}", f"      cost {_cost(cost)}"]
    if len(costs) > 1:
        lines += [
            f"  {cause}: {said['count']} of them, {readable.duration(said['total_s'])}, {said['lost_steps']} steps lost"
            for cause, said in _classes(costs).items()
        ]
    return "\n".join(lines)


def _who(cost: Cost) -> str:
    fault = cost.fault
    if fault.record["kind"] == "epoch":
        return f"epoch {fault.epoch}: island {fault.island} {fault.evidence or 'was lost'}"
    if fault.record["kind"] in ("skip", "rewind"):
        done = f"went back to step {fault.record['to']}" if "to" in fault.record else "left its batch out"
        return f"step {fault.record.get('step')}: {done}: {fault.evidence}"
    if fault.island is not None:
        return readable.failure(fault.record)
    return f"attempt {fault.record.get('attempt', '?')}: {readable.failure(fault.record)}"


def _cost(cost: Cost) -> str:
    parts = {"detection": cost.detection_us, "recovery": cost.recovery_us, "lost work": cost.lost_us}
    named = ", ".join(f"{name} {readable.duration(us / 1e6)}" for name, us in parts.items() if us >= 50_000)
    steps = f"; {cost.lost_steps} steps lost" if cost.lost_steps else ""
    away = f"; nobody was running for {readable.duration(cost.away_us / 1e6)}" if cost.away_us else ""
    return readable.duration(cost.total_us / 1e6) + (f" ({named})" if named else "") + steps + away


def _classes(costs: list[Cost]) -> dict[str, dict[str, Any]]:
    """What each class of failure has cost in all, the dearest first."""
    found: dict[str, dict[str, Any]] = {}
    for cost in costs:
        said = found.setdefault(cost.fault.cause, {"count": 0, "total_s": 0.0, "lost_steps": 0})
        said["count"] += 1
        said["total_s"] += cost.total_us / 1e6
        said["lost_steps"] += cost.lost_steps
    return dict(sorted(found.items(), key=lambda item: -item[1]["total_s"]))


def _results(r: Report) -> str:
    if r.speed is None:
        return "no step was committed"
    s, found = r.speed, r.history
    mfu = f"{readable.percent(s.mfu)} ({CONVENTION})" if s.mfu is not None else "- (the device's peak is not known)"
    hfu = "" if s.hfu is None else f", HFU {readable.percent(s.hfu)}"
    lines = (
        _of_script(s, found)
        if found.script
        else [
            f"speed       {readable.count(s.tokens_per_s)} tokens/s (median), MFU {mfu}{hfu}{_memory(s)}",
            f"step        {readable.short(s.step_s)} median, {readable.short(s.step_p5_s)} to "
            f"{readable.short(s.step_p95_s)} (5th to 95th percentile), "
            f"{readable.percent(s.data_wait_share)} of it waiting for data",
            *_device(s),
            *([] if r.planned is None else planned.lines(r.planned)),
            f"tokens      {readable.count(s.tokens)} in {len(found.steps)} steps",
            f"loss        {readable.number(found.steps.last('loss'))} at the last step",
        ]
    )
    if best := best_eval(found):
        last = found.evals[-1]
        final = f"{readable.number(last['loss'])}{evaluations.precision(last)}"
        lines.append(f"evaluation  {final} at the last, {readable.number(best[1])} at best (step {best[0]})")
        lines += [f"            {line}" for line in evaluations.table(last)]
    lines += router.lines(found.router, found.steps)
    if found.checkpoints:
        last = found.checkpoints[-1]
        failed = f"; {found.checkpoints_failed} could not be saved" if found.checkpoints_failed else ""
        size = readable.size(last.get("bytes") or 0)
        lines.append(f"checkpoints {len(found.checkpoints)} saved, the newest at step {last['step']} ({size}){failed}")
        if stalls := sorted(float(c["stall_s"]) for c in found.checkpoints if "stall_s" in c):
            median, most = readable.short(stalls[len(stalls) // 2]), readable.short(stalls[-1])
            lines.append(f"            training waited {median} for one (median), {most} at most")
    # The newest word on each, and the one that costs most first.
    slow = {(r.get("island"), r.get("rank")): r for r in found.stragglers}
    for record in sorted(slow.values(), key=lambda r: float(r["usual_s"]) - float(r["own_s"]))[:MOST_STRAGGLERS]:
        lines.append(f"straggler   {readable.straggler(record)}")
    if found.digest:
        lines.append(f"digest      {found.digest} (of the final parameters)")
    return "\n".join(lines)


def _tasks(found: History) -> str:
    lines = tasks.table(tasks.series(found.tasks))
    lines = ["tasks (95% intervals)", *(f"  {line}" for line in lines)] if lines else []
    if found.samples:
        lines += tasks.written(found.samples[-1], MOST_SAMPLES)
    return "\n".join(lines)


def _finite(point: dict[str, Any]) -> dict[str, Any]:
    return {name: value if name in ("step", "n") else readable.json_number(value) for name, value in point.items()}


def _of_script(s: Speed, found: History) -> list[str]:
    """Nobody counts its tokens, nor knows its peak."""
    return [
        f"step        {readable.short(s.step_s)} median, {readable.short(s.step_p5_s)} to "
        f"{readable.short(s.step_p95_s)} (5th to 95th percentile)",
        f"steps       {found.steps.last('step')}, as its optimizer has taken them",
        f"loss        {readable.number(found.steps.last('loss'))} at the last step, as rank 0 gave it to backward",
    ]


def _memory(s: Speed) -> str:
    if s.memory_bytes_per_s is None:
        return ""
    share = "" if s.memory_share is None else f" ({readable.percent(s.memory_share, 0)} of its bandwidth)"
    return f", memory {s.memory_bytes_per_s / 1e12:.2f} TB/s a device{share}"


def _device(s: Speed) -> list[str]:
    """What the device did in a step, by its own timeline."""
    if not s.device_s:
        return []
    told = ", ".join(f"{_PHASES.get(name, name)} {readable.short(seconds)}" for name, seconds in s.device_s.items())
    return [f"device      {told} (median of a step, by marks in its queue)"]


_PHASES = {
    "wait_s": "waiting for the host",
    "forward_s": "forward",
    "backward_s": "backward",
    "compute_s": "forward and backward",
    "clip_s": "norm and sums",
    "trade_s": "trading with islands",
    "optimizer_s": "optimizer",
}


def _curves(found: History) -> list[str]:
    if not len(found.steps):
        return []
    steps = found.steps.column("step")
    evals = [(float(r["step"]), float(r["loss"])) for r in found.evals]
    losses = shown(steps, found.steps.column("loss"), [x for x, y in evals if math.isfinite(y)])
    rates = shown(steps, found.steps.tokens_per_s())
    breaks = [float(b.reached) for b in found.breaks]
    legend = ("  (o evaluation)" if evals else "") + ("  (dotted line: restart)" if breaks else "")
    return [
        f"loss{legend}\n{plot(losses, evals, breaks)}",
        *([] if found.script else [f"tokens/s\n{plot(rates, breaks=breaks, from_zero=True, height=5)}"]),
        *_learning_rate(found, breaks),
    ]


def _learning_rate(found: History, breaks: list[float]) -> list[str]:
    """Over all attempts: where a run was prolonged, this shows how it went on."""
    rates = found.steps.column("lr")
    if not np.isfinite(rates).any():  # a journal of other hands
        return []
    return [f"learning rate\n{plot(shown(found.steps.column('step'), rates), breaks=breaks, from_zero=True, height=5)}"]


def _identity(run_dir: RunDir, found: History) -> str:
    """What ran, in one line: enough to tell two reports apart."""
    start, parts = found.start, []
    if found.script:
        processes = int(start.get("world", 1))
        parts += [Path(found.script).name, f"{processes} process{'es' if processes > 1 else ''}"]
    elif start:
        mesh = start.get("mesh", {})
        axes = [f"{name} {mesh[name]}" for name in AXES if mesh.get(name, 1) not in (1, "auto", None)]
        ways = [mesh.get(name) for name in ("schedule", "cp_method", "recompute")]
        ways += ["reduce micro_batch"] if mesh.get("reduce") == "micro_batch" else []
        layout = ", ".join(
            [" x ".join(axes)] * bool(axes) + [str(way) for way in ways if way not in ("auto", "none", None)]
        )
        processes = int(start.get("world", 1))
        parts.append(f"{readable.count(start.get('params') or 0)} parameters")
        where = f"{processes} process{'es' if processes > 1 else ''} on {start.get('device')}"
        parts.append(f"{where} ({layout})" if layout else where)
        parts.append(str(start.get("precision")))
    try:
        known = read_object(run_dir.identity_file)
    except (OSError, ValueError):
        known = {}
    git, data = (part if isinstance(part := known.get(name), dict) else {} for name in ("git", "data"))
    if isinstance(commit := git.get("commit"), str):
        parts.append(f"commit {commit[:10]}" + (" (dirty)" if git.get("dirty") else ""))
    if prints := [found[:8] for found in data.values() if isinstance(found, str)]:
        parts.append(f"data {', '.join(prints)}")
    if isinstance(seed := known.get("seed"), int) and not found.script:
        parts.append(f"seed {seed}")
    return " · ".join(parts) or "not started"


def best_eval(found: History) -> tuple[int, float] | None:
    evals = [(float(r["loss"]), int(r["step"])) for r in found.evals]
    finite = [(loss, step) for loss, step in evals if math.isfinite(loss)]
    return (min(finite)[1], min(finite)[0]) if finite else None


def nearby(path: Path) -> str:
    """Relative to where the reader is, when that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
