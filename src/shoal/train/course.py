"""The learning rate over a run in words: a line for each schedule that it has had. No torch."""

from __future__ import annotations

from shoal.spec.length import decay_steps, warmup_steps
from shoal.spec.run import Run
from shoal.spec.schedule import Past, Schedule
from shoal.train.schedule import lr_ratio


def course(run: Run) -> list[str]:
    """Of a run whose steps are known, oldest first."""
    if run.own.schedule is not None:
        return [f"rate: by {run.own.schedule}"]
    schedule, lr = run.train.schedule, run.train.optimizer.lr
    pieces: list[Schedule | Past] = [*schedule.past, schedule]
    ends = [*(past.until for past in schedule.past), run.steps]
    lines = []
    for i, (piece, end) in enumerate(zip(pieces, ends, strict=True)):
        begin = ends[i - 1] if i else 0
        then = schedule.past[i - 1].then if i else None
        meant = piece.steps if isinstance(piece, Past) else run.steps
        at = lr * lr_ratio(schedule, begin, run.steps)
        words = _way(piece, then, meant, begin, lr, at)
        stopped = f", until it was replaced at step {end:,}" if end < meant else ""
        lines.append(f"rate from step {begin + 1:,}: {words}{stopped}")
    return lines


def _way(piece: Schedule | Past, then: str | None, steps: int, begin: int, lr: float, at: float) -> str:
    floor = f"{lr * piece.min_ratio:.3g} at step {steps:,}"
    if then == "keep":
        return f"{at:.3g}, which it had, to step {steps:,}"
    if then == "decay":
        return f"{at:.3g}, which it had, falling to {floor}"
    rest = steps - begin if then == "rewarm" else steps
    warmup = warmup_steps(piece.warmup_steps, rest)
    up = f"up to {lr:.3g} over {warmup:,} step{'s' * (warmup > 1)}" if warmup else f"{lr:.3g}"
    if then == "rewarm":
        up = f"{up} again, from what it had"
    elif begin:
        up = f"{at:.3g}, of {up}"
    if piece.name == "constant":
        return f"{up}, and constant to step {steps:,}"
    decay = f" over the last {decay_steps(piece.decay_steps, rest):,} steps" if piece.name == "wsd" else ""
    return f"{up}, then {piece.name} to {floor}{decay}"
