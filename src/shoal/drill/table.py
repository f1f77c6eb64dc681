"""The result of a drill as people read it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal import readable
from shoal.drill.account import Account
from shoal.drill.drill import Result
from shoal.drill.measure import Measured

_COLUMNS = ("fault", "victim", "step", "noticed after", "stall", "lost steps", "samples lost", "repeated")


def table(result: Result) -> str:
    return "\n".join([*rows_of(result.faults), "", *_verdict(result)])


def rows_of(faults: Sequence[Measured], samples: bool = True) -> list[str]:
    """Without the columns about samples, of what nobody knows any."""
    wide = len(_COLUMNS) if samples else len(_COLUMNS) - 2
    rows = [_COLUMNS[:wide], *(_row(fault)[:wide] for fault in faults)]
    widths = [max(len(row[i]) for row in rows) for i in range(wide)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return lines + [f"  {fault.kind} at step {fault.step}: {fault.note}" for fault in faults if fault.note]


def _row(fault: Measured) -> tuple[str, ...]:
    return (
        fault.kind,
        fault.victim,
        str(fault.step),
        "-" if fault.detection_s is None else readable.short(fault.detection_s),
        "-" if fault.stall_s is None else readable.short(fault.stall_s),
        str(fault.lost_steps),
        str(fault.lost_samples),
        str(fault.repeated_samples),
    )


def _verdict(result: Result) -> list[str]:
    lines = []
    if result.account and result.calm:
        if result.goodput is not None:
            broken, calm = readable.percent(result.goodput, 0), readable.percent(result.calm.ledger.goodput, 0)
            lines.append(f"goodput {broken} (without faults: {calm})")
        lines.append(f"ledger {_sum(result.account)} (without faults: {_sum(result.calm)})")
    if result.samples.left_out:
        lines.append(f"{result.samples.left_out} samples were left out on purpose (`skip` and `rewind` in the journal)")
    if result.same is not None:
        same = "that of the run without faults"
        if not result.same:
            why = "; it is with fleet.deterministic=true" if result.could_be_same else ""
            same = f"not that of the run without faults ({result.calm_digest}{why})"
        lines.append(f"final digest {result.digest}: {same}")
    if result.passed:
        again = sum(fault.resumed for fault in result.faults)
        started = f" (started again {again} time{'s' * (again > 1)}, as a scheduler would)" if again else ""
        lines.append(f"passed: the run ended by itself{started}; no sample was lost or repeated")
    else:
        wrong = [] if result.ended else ["the run did not end by itself"]
        wrong += [result.how] * bool(result.how)
        wrong += [f"{result.lost_samples} samples lost"] * bool(result.lost_samples)
        wrong += [f"{result.repeated_samples} samples repeated"] * bool(result.repeated_samples)
        wrong += ["the final parameters are others"] * (result.ended and result.has_to_be_same and not result.same)
        wrong += ["the ledger does not account for the time"] * (not result.accounted)
        lines.append(f"not passed: {'; '.join(wrong)}")
    return lines


def _sum(account: Account) -> str:
    """Its parts and the time between sessions, against the drill's clock."""
    said = f"sums to {account.parts_s + account.between_s:.2f} s of {account.wall_s:.2f} s"
    return f"{said}, {readable.percent(account.off, 1)} off"
