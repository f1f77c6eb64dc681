"""Items of a task out of files of others: JSON lines, one JSON list, or Parquet.

As `datasets` has it, every item has every field that any of them has; what an item does not say is None.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.errors import DataError, needs_extra
from shoal.generate.limited import Allowance, Refused, limited
from shoal.plain_file import read_plain
from shoal.values import BadValue, read_json, read_large

MOST_BYTES = 1 << 30  # of one file
MOST_ITEMS = 1_000_000
MOST_VALUES = 20_000_000
# pyarrow can be made to crash: Parquet is read by a child. A file of 1 GiB takes less than a minute.
PARQUET = Allowance(cpu_s=300, memory_bytes=8 << 30, answer_bytes=MOST_BYTES)

Row = dict[str, Any]


def read_items(paths: Sequence[Path], kind: str) -> list[Row]:
    """Of files of one kind ("json" or "parquet"), in their order."""
    rows: list[Row] = []
    for path in paths:
        rows += _parquet(path) if kind == "parquet" else _json(path)
        if len(rows) > MOST_ITEMS:
            raise DataError(f"{path} brings the task to more than {MOST_ITEMS:,} items; split it into several tasks.")
    if not rows:
        raise DataError(f"{paths[0]} has no items; a task needs at least one." if paths else "no file is named.")
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def _json(path: Path) -> list[Row]:
    data = _read(path)
    lines = data.split(b"\n")
    begins = next((line.lstrip(b"\xef\xbb\xbf \t\r") for line in lines if not line.isspace() and line), b"")
    if begins.startswith(b"["):
        try:
            said = read_json(data, most_parts=MOST_VALUES, most_bytes=MOST_BYTES, huge=True)
        except BadValue as e:
            raise DataError(f"{path} is neither JSON lines nor a JSON list: {e.reason}; correct it.") from None
        return [_row(one, f"{path} item {n:,}") for n, one in enumerate(said)]
    rows = []
    for n, line in enumerate(lines, start=1):
        if line.isspace() or not line:
            continue
        try:
            rows.append(_row(read_json(line, huge=True), f"{path} line {n:,}"))
        except BadValue as e:
            raise DataError(f"{path} line {n:,} cannot be read: {e.reason}; correct it.") from None
    return rows


def _row(said: object, where: str) -> Row:
    if not isinstance(said, dict):
        raise DataError(f'{where} is no JSON object; write an item a line: {{"question": …}}.')
    return said


def _parquet(path: Path) -> list[Row]:
    try:
        import pyarrow.parquet  # noqa: F401  # here, so that the child has it already
    except ImportError:
        raise needs_extra("pyarrow", "data", "reading Parquet") from None
    data = _read(path)
    try:
        said = limited(lambda: _rows(data), PARQUET)
    except Refused as e:
        raise DataError(f"{path} cannot be read as Parquet: {e}; write it again, or as JSON lines.") from None
    try:
        rows = read_large(said, MOST_VALUES)
    except BadValue as e:
        raise DataError(f"{path} cannot be read as Parquet: {e.reason}; write it again, or as JSON lines.") from None
    return [_row(row, f"{path} row {n:,}") for n, row in enumerate(rows)]


def _rows(data: bytes) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(pa.BufferReader(data), use_threads=False).to_pylist()
        return json.dumps(rows, default=str, allow_nan=False).encode()
    except MemoryError:
        raise
    except Exception as e:  # whatever pyarrow says of a damaged file
        raise Refused(str(e).partition("\n")[0][:200]) from None


def _read(path: Path) -> bytes:
    try:
        return read_plain(path, MOST_BYTES)
    except FileNotFoundError:
        raise DataError(f"there is no file {path}, where the task's items should be; correct data_files.") from None
