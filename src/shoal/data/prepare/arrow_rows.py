"""Rows of an Arrow batch as Python values, a few at a time: never more text than one document may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shoal.data.broken import TOO_LONG, Unreadable
from shoal.data.prepare.readers_bytes import Growth
from shoal.data.prepare.units import Reading

ROW_BYTES = 8  # a row counts as so much even when it is empty: rows can be claimed too

Row = Mapping[str, Any]


def rows_of(batch: Any, reading: Reading, growth: Growth) -> Iterator[Row]:
    """`batch`: a RecordBatch of the columns that are needed. A text that is too long or no text is `Unreadable`."""
    most_bytes = reading.document_bytes
    plain = not any(_of_entries(column.type) for column in batch.columns)
    lengths = [] if plain and batch.nbytes <= most_bytes else [_lengths(column) for column in batch.columns]
    size = sum(_sum(one) for one in lengths) if lengths else batch.nbytes
    if lengths and size > most_bytes and len(batch) > 1:
        half = len(batch) // 2
        yield from rows_of(batch.slice(0, half), reading, growth)
        yield from rows_of(batch.slice(half), reading, growth)
        return
    growth.add(size + len(batch) * ROW_BYTES)
    columns = [_values(column, lengths[i] if lengths else None, reading) for i, column in enumerate(batch.columns)]
    names = batch.schema.names
    for i in range(len(batch)):
        yield {name: column[i] for name, column in zip(names, columns, strict=True)}


def _values(column: Any, lengths: Any, reading: Reading) -> list[Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    too_long: list[int] = []
    if lengths is not None and (pc.max(lengths).as_py() or 0) > reading.document_bytes:
        over = pc.fill_null(pc.greater(lengths, reading.document_bytes), False)
        too_long = [i for i, one in enumerate(over.to_pylist()) if one]
        column = pc.if_else(over, pa.scalar(None, column.type), column)
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        if _of_entries(column.type):
            column = column.dictionary_decode()
        values = [_text(one) for one in column.cast(pa.large_binary()).to_pylist()]
    for i in too_long:
        values[i] = Unreadable("record too long", f"is longer than {reading.max_document_mb:,} MiB", TOO_LONG)
    return values


def _text(value: bytes | None) -> str | Unreadable | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError as e:
        return Unreadable("invalid UTF-8", f"is not UTF-8 ({e.reason} at byte {e.start:,})", "convert it")


def _lengths(column: Any) -> Any:
    """The bytes of each text; None for a column of something else, which has no long values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if _of_entries(column.type):
        one = _lengths(column.dictionary)
        return None if one is None else pc.take(one, column.indices)
    if pa.types.is_string_view(column.type) or pa.types.is_binary_view(column.type):
        column = column.cast(pa.large_binary())
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return pc.binary_length(column) if any(kind(column.type) for kind in kinds) else None


def _sum(lengths: Any) -> int:
    import pyarrow.compute as pc

    return 0 if lengths is None else pc.sum(pc.cast(lengths, "int64")).as_py() or 0


def _of_entries(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_dictionary(kind))
