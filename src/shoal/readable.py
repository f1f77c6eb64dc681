"""Numbers and causes as people read them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

# What moves the cursor, colours, rings, renames the window or turns the order of letters around: all that a terminal
# obeys but line ends and tabs.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def harmless(text: str) -> str:
    """What strangers or models wrote, for a terminal: what it would obey is spelled out."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def count(n: float) -> str:
    """1234 → 1.23k, 5_600_000 → 5.6M."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= limit * 0.9995:
            return f"{n / limit:.3g}{unit}"
    return f"{n:.3g}" if n != int(n) else f"{int(n)}"


def size(n_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def short(seconds: float) -> str:
    """For what is mostly below a second."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def duration(seconds: float) -> str:
    """Two units are enough: 4.2 s, 3 m 20 s, 2 h 05 m, 3 d 4 h."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {s:02d} s"
    hours, m = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {m:02d} m"
    return f"{hours // 24} d {hours % 24} h"


def number(value: Any, digits: int = 4) -> str:
    """A loss as the journal has it: a number, or the string 'nan' / 'inf', or nothing."""
    if value is None:
        return "-"
    return f"{float(value):.{digits}g}" if digits < 4 else f"{float(value):.{digits}f}"


def json_number(value: float | str | None) -> float | str | None:
    """JSON has no NaN and no infinity: as in the journal, a word says so."""
    return value if value is None or math.isfinite(float(value)) else str(float(value))


def percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f}%"


def clause(sentence: str, most: int = 80) -> str:
    """The first thing that a sentence says, for a line of a table: without what follows from it and what to do."""
    said = sentence.split("; ")[0].rstrip(".")
    if len(said) <= most:
        return said
    ends = [at for mark in (", ", ": ", " (") if (at := said.rfind(mark, most // 4, most)) > 0]
    return said[: max(ends)] if ends else said[: most - 1].rstrip() + "…"


def whom(record: Mapping[str, Any]) -> str:
    """`rank 1`, `island 2 rank 0`, or nothing: whom a record is about."""
    return " ".join(f"{what} {record[what]}" for what in ("island", "rank") if record.get(what) is not None)


def straggler(record: Mapping[str, Any]) -> str:
    """A `straggler` record in one line."""
    own, usual = short(float(record.get("own_s", 0.0))), short(float(record.get("usual_s", 0.0)))
    who, ranks = whom(record), record.get("ranks")
    if isinstance(ranks, list) and len(ranks) > 1:
        who = f"one of ranks {ranks[0]} to {ranks[-1]}, which share each layer,"
    by = {"device": " (forward pass, by the device's clock)", "host": " (by the host's clock)"}
    return (
        f"{who} is slow in {record.get('phase')}: {own} a step, the others {usual}{by.get(str(record.get('by')), '')}"
    )


def epoch(record: Mapping[str, Any]) -> str:
    """Who is gone and who has come, and who goes on."""
    news = [f"island {island} is gone ({why})" for island, why in dict(record.get("left") or {}).items()]
    news += [f"island {island} has joined" for island in record.get("joined") or ()]
    members = ", ".join(str(island) for island in sorted(record.get("members") or ()))
    return f"{', '.join(news)}; in the fleet: {members}"


def failure(record: Mapping[str, Any]) -> str:
    """A `failure` record in one line: who, what, and what was done."""
    who = whom(record) or "the run"
    cause = str(record.get("cause") or "failed")
    evidence = f" ({record['evidence']})" if record.get("evidence") else ""
    action = f"; {record['action']}" if record.get("action") else ""
    return f"{who}: {cause}{evidence}{action}"


def notes(start: Mapping[str, Any]) -> list[str]:
    """What a `start` record says that training leaves out."""
    said = start.get("notes")
    return [text for text in said if isinstance(text, str)] if isinstance(said, list) else []
