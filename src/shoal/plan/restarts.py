"""What a failure costs, by the way a run comes back from it. No torch.

Every time has a range and says where it is from. Those measured here were measured on one machine; at thousands of
devices the ranges reach to what others have published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.errors import SpecError


@dataclass(frozen=True)
class Span:
    """Seconds, and what they lie between with about 90%."""

    s: float
    low_s: float
    high_s: float
    source: str


@dataclass(frozen=True)
class Style:
    """How a run survives. Without islands everybody waits for all of it; with them only the lost one does."""

    name: str
    what: str
    detect: Span  # until somebody knows
    restart: Span  # processes, communicators
    load: Span  # the state: from storage, from memory, from a peer
    replace: Span  # until another machine is there, for those failures that need one
    # Three quarters of the faults at Ant are cured by starting a process again (DLRover, flash_checkpoint.md, 2026-08).
    replace_share: float = 0.25
    islands: int = 1  # groups that go on without each other
    spares: bool = False  # machines that stand by; how many is chosen unless said


NOTHING = Span(0.0, 0.0, 0.0, "there is none")
# Crashes are seen at once, hangs (a tenth of ByteRobust's failures) after a time-out of 10 to 30 minutes.
TIME_OUT = Span(60, 10, 600, "a tenth of failures are hangs, seen after 10 min (ByteRobust, arXiv 2509.16293, 2025-09)")
HANG_NAMED = Span(8, 0.6, 60, "hangs named in 7.2 s, deaths in 0.6 s (claims.md, 2026-11); 2 to 60 s at ByteDance")
PROCESSES = Span(60, 6, 120, "6 s for Python and torch (claims.md, 2026-11); below 2 min on HyperPod (AWS, abstract)")
FROM_NEAR = Span(15, 3, 60, "14.8 GB in 9 s on one H200 (claims.md, 2026-11)")
FROM_QUEUE = Span(600, 120, 1800, "dlrover#1690: 10 min for 30 pods; a median of 11 min to retry (arXiv 2605.09370)")

STYLES: Mapping[str, Style] = {
    style.name: style
    for style in (
        Style(
            "manual",
            "a person restarts the run",
            Span(3 * 3600, 0.5 * 3600, 8 * 3600, "an assumption: minutes in office hours, a night otherwise"),
            Span(3600, 900, 2 * 3600, "an assumption, with finding the broken machine"),
            Span(120, 30, 600, "as for remote"),
            NOTHING,
            replace_share=0.0,
        ),
        Style(
            "remote",
            "the scheduler restarts the whole run from a checkpoint on remote storage",
            TIME_OUT,
            Span(480, 240, 1200, "10 min in all at 100,000 GPUs (arXiv 2602.00277, 2026-02); 15 to 30 on AWS"),
            Span(120, 30, 600, "5.2 TB of a 405B checkpoint at 40 GB/s; an assumption about storage"),
            NOTHING,  # the queue is in the time of the restart
            replace_share=0.0,
        ),
        Style(
            "supervised",
            "a supervisor restarts all processes from near checkpoints; for a broken machine it waits for the queue",
            HANG_NAMED,
            PROCESSES,
            FROM_NEAR,
            FROM_QUEUE,
        ),
        Style(
            "spares",
            "as supervised, and a machine that stands by takes the place of a broken one",
            HANG_NAMED,
            PROCESSES,
            FROM_NEAR,
            Span(20, 5, 60, "an assumption; below 40 s in all for 512 A100 (DeadPool, arXiv 2607.01646, abstract)"),
            spares=True,
        ),
        Style(
            "islands",
            "the others go on at once, and take the lost island back when it has caught up",
            Span(
                4, 0.04, 180, "0.04 s dead, 4 s silent (claims.md, 2026-11); 3 min at 100,000 GPUs (arXiv 2602.00277)"
            ),
            PROCESSES,
            Span(20, 15, 120, "20 s for 8B from a peer on the right network, 948 s on the wrong one (torchft#329)"),
            FROM_QUEUE,
            islands=16,
        ),
    )
}


def style(name: str, islands: int = 1) -> Style:
    """`islands`: how many there are, where a run says so."""
    if name in STYLES:
        found = STYLES[name]
        return replace(found, islands=islands) if found.islands > 1 and islands > 1 else found
    raise SpecError(f"there is no restart style '{name}'; use one of {', '.join(STYLES)}.")
