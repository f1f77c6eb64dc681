"""What a step sent, as the journal's `traffic` records have it and as a report shows it. No torch.

A record has the rows of one counted step, summed over all processes; what a byte means is said in
`shoal.parallel.count`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal import readable

# From the innermost axis out, as a reader meets them in a layer; names that are not here come last.
_ORDER = ("tp", "cp", "ep", "pp", "expert shard", "shard", "expert replicate", "replicate", "all")


def newest(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The last record that has something to show: one process alone sends nothing."""
    return next((r for r in reversed(records) if r.get("rows")), None)


def lines(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """For a report: a table of the newest counted step; nothing when none was counted."""
    record = newest(records)
    if record is None:
        return []
    world, rows = int(record["world"]), sorted(record["rows"], key=_place)
    table = [("axis", "of", "operation", "calls", "bytes", "busiest process")]
    table += [
        (
            str(row["axis"]),
            str(row["group"]),
            str(row["op"]),
            str(row["most_calls"]),
            readable.size(row["bytes"] / world),
            readable.size(row["most_bytes"]),
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    total = readable.size(sum(row["bytes"] for row in rows) / world)
    told = [f"communication in step {record['step']}: {total} a process"]
    for line in table:
        cells = [
            text.ljust(width) if i in (0, 2) else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        told.append("  " + "  ".join(cells))
    return told


def _place(row: Mapping[str, Any]) -> tuple[int, str, str]:
    axis = str(row["axis"])
    first = axis.split("=")[0]
    return _ORDER.index(first) if first in _ORDER else len(_ORDER), axis, str(row["op"])
