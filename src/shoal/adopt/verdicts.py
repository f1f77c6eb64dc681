"""What the measured losses say about what was found by reading, and what they show that nobody had found."""

from __future__ import annotations

from dataclasses import replace

from shoal.adopt.doctor import Report
from shoal.adopt.finding import CONFIRMED, REFUTED, Finding, merged
from shoal.adopt.measured import Measured, Row

OF_ORDER = ("checkpoint-rng", "order-lost", "checkpoint-position")
OF_UPDATES = ("checkpoint-optimizer", "checkpoint-schedule", "checkpoint-scaler")


def judged(report: Report, measured: Measured) -> Report:
    repeated, resumed, spread = (measured.row(name) for name in ("repeated", "resumed", "two processes"))
    trusted = resumed if repeated.same else replace(resumed, same=None)  # who never repeats cannot be compared
    found = [_about(finding, repeated, trusted, spread) for finding in report.findings]
    found += _new(report, found, repeated, trusted, spread)
    return replace(report, findings=merged(found))


def _about(finding: Finding, repeated: Row, resumed: Row, spread: Row) -> Finding:
    if finding.rule == "no-seed" and repeated.same is not None:
        return _said(finding, not repeated.same, repeated)
    if finding.rule in (*OF_ORDER, *OF_UPDATES) and resumed.same is not None:
        if resumed.same:
            return _said(finding, False, resumed)
        # The first loss after a resume is of the weights, the batch and its random numbers; the next ones also of
        # what the optimizer has made of it.
        fits = OF_ORDER if resumed.after == 0 else OF_UPDATES
        return _said(finding, True, resumed) if finding.rule in fits else replace(finding, measured=resumed.found)
    if finding.rule == "ddp-sampler" and spread.same:
        return _said(finding, True, spread)
    if finding.rule == "one-rank-collective" and spread.same is False and spread.after < 0:
        return _said(finding, True, spread)
    return finding


def _said(finding: Finding, confirmed: bool, row: Row) -> Finding:
    return replace(finding, confidence=CONFIRMED if confirmed else REFUTED, measured=row.found)


def _new(report: Report, found: list[Finding], repeated: Row, resumed: Row, spread: Row) -> list[Finding]:
    """What no rule has found."""
    confirmed = {finding.rule for finding in found if finding.confidence == CONFIRMED}
    new = []
    if repeated.same is False and "no-seed" not in confirmed:
        new.append(("not-repeated", "two runs with the same arguments do not give the same losses.", repeated))
    if resumed.same is False and not confirmed & {*OF_ORDER, *OF_UPDATES}:
        first = "order, position or random numbers" if resumed.after == 0 else "the optimizer, its schedule or scaler"
        new.append(("not-resumed", f"a resumed run does not go on as it was; by the curve it is {first}.", resumed))
    if spread.same is False and (report.training.spreads or report.training.helpers):
        new.append(("two-processes", "it is written for several processes, and fails on two.", spread))
    return [Finding(rule, report.script, 1, reason, (), CONFIRMED, row.found) for rule, reason, row in new]
