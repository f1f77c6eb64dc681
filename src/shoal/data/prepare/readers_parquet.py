"""Rows of Parquet files, in bounded memory whatever the file claims (shoal.data.prepare.parquet_pages says how many at
once).

pyarrow can be made to crash (a schema of 20,000 levels ends the process): nothing here is called in the process of the
user, but in those of shoal.data.prepare.table_look and shoal.data.prepare.workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from shoal.data.broken import AGAIN, Broken, first_line, some
from shoal.data.prepare.arrow_rows import Row, rows_of
from shoal.data.prepare.bad_input import Problems
from shoal.data.prepare.inputs import Input
from shoal.data.prepare.parquet_pages import Unclear, look_at_pages, rows_at_once
from shoal.data.prepare.readers_bytes import Growth
from shoal.data.prepare.units import Piece, Reading
from shoal.errors import needs_extra
from shoal.plain_file import open_plain

# pyarrow reads through a buffer of this size; without one it reads all of a row group's column at once.
READ_BYTES = 1 << 18
LEAST_GROUP_BYTES = 16  # of a row group, in the footer alone
OLD_HEADER_BYTES = 100  # that writers before parquet-mr 1.2.9 forgot to count (PARQUET-816)


def row_groups(one: Input, reading: Reading, problems: Problems) -> Iterator[tuple[int, int, int]]:
    """(n, n + 1, size_bytes) of each row group."""
    file = _open(one, problems)
    if file is None:
        return
    with file:
        meta, schema = file.metadata, file.schema_arrow
        fields = reading.fields
        missing = [f for f in fields if f not in schema.names]
        nested = [f for f in fields if f in schema.names and schema.types[schema.names.index(f)].num_fields]
        if missing:
            what = f"has no column '{missing[0]}' (it has {some(schema.names)})"
            problems.found("missing field", lambda: one.path, what, "name the right one with --text-field")
        elif nested:
            what = f"has lists or groups in the column '{nested[0]}', where text is expected"
            problems.found("field is not text", lambda: one.path, what, "name another with --text-field")
        elif wrong := _wrong(meta, _leaves(meta, fields), one.size_bytes):
            problems.found("broken file", lambda: one.path, wrong, AGAIN)
        else:
            rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
            if not sum(rows):
                problems.found("empty file", lambda: one.path, "has no rows", "remove it")
                return
            for i, count in enumerate(rows):
                yield i, i + 1, max(1, one.size_bytes * count // sum(rows))


def parquet_rows(
    piece: Piece, reading: Reading, problems: Problems, on_bytes: Callable[[int], None]
) -> Iterator[tuple[Row, Callable[[], str]]]:
    import pyarrow as pa

    path = piece.input.path
    file = _open(piece.input, problems)
    if file is None:
        return
    growth = Growth.of(piece, reading)
    with file:
        groups = [file.metadata.row_group(i).num_rows for i in range(piece.stop)]
        number, rows = sum(groups[: piece.start]), sum(groups[piece.start :])
        try:
            for i in range(piece.start, piece.stop):
                # Threads of its own would fight with the other workers for the cores.
                for batch in file.iter_batches(
                    _rows_at_once(file, path, i, reading), row_groups=[i], columns=reading.fields, use_threads=False
                ):
                    for n, row in enumerate(rows_of(batch, reading, growth), start=number):
                        yield row, lambda n=n: f"{path} row {n:,}"  # type: ignore[misc]  # mypy cannot infer n
                    number += len(batch)
                    on_bytes(piece.size_bytes * len(batch) // max(rows, 1))
        except Broken as e:
            what = f"{e} (row group {i}, from row {number:,} on)"
            problems.found(e.reason, lambda: path, what, e.advice)
        except MemoryError:
            what = f"takes too much memory to read (row group {i}, from row {number:,} on)"
            advice = "write it with smaller pages and row groups, or allow more with --buffer-mb"
            problems.found("takes too much memory", lambda: path, what, advice)
        except (pa.ArrowException, OSError) as e:
            what = f"cannot be read from row {number:,} on ({first_line(e)})"
            problems.found("broken file", lambda: f"{path} row {number:,}", what, AGAIN)


def _open(one: Input, problems: Problems) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise needs_extra("pyarrow", "data", "reading Parquet") from None
    try:
        os.close(open_plain(one.path))
        return pq.ParquetFile(one.path, pre_buffer=False, buffer_size=READ_BYTES)
    except MemoryError:
        what = "takes too much memory to open"
        problems.found("takes too much memory", lambda: one.path, what, "write it with fewer columns and row groups")
    except (pa.ArrowException, OSError, ValueError) as e:
        why = "a column's name is no text" if isinstance(e, UnicodeDecodeError) else first_line(e)
        what = f"is no Parquet file that can be read ({why})"
        problems.found("broken file", lambda: one.path, what, AGAIN)
    return None


def _leaves(meta: Any, fields: list[str]) -> list[int]:
    """The numbers of these columns among the columns that are stored."""
    paths = [meta.schema.column(i).path for i in range(meta.num_columns)]
    return [paths.index(field) for field in fields if field in paths]


def _wrong(meta: Any, leaves: list[int], size_bytes: int) -> str | None:
    """What the footer says that no file can hold."""
    if meta.num_row_groups > size_bytes // LEAST_GROUP_BYTES:
        return f"claims {meta.num_row_groups:,} row groups in {size_bytes:,} bytes"
    claimed = 0
    for i in range(meta.num_row_groups):
        group = meta.row_group(i)
        chunks = [group.column(j) for j in leaves if j < group.num_columns]
        sizes = [chunk.total_compressed_size for chunk in chunks]
        starts = [_start(chunk) for chunk in chunks]
        if len(chunks) < len(leaves) or group.num_rows < 0 or any(n < 0 for n in (*sizes, *starts)):
            return f"has a footer that makes no sense at row group {i}"
        claimed += sum(sizes)
        if claimed > size_bytes + (i + 1) * OLD_HEADER_BYTES:
            return f"claims more than {size_bytes:,} bytes of data up to row group {i}, and has no more"
    return None


def _start(chunk: Any) -> int:
    first = chunk.dictionary_page_offset if chunk.has_dictionary_page else None
    return int(chunk.data_page_offset if first is None or first <= 0 else min(first, chunk.data_page_offset))


def _rows_at_once(file: Any, path: str, group: int, reading: Reading) -> int:
    meta = file.metadata.row_group(group)
    fd = open_plain(path)
    try:
        columns = []
        for leaf in _leaves(file.metadata, reading.fields):
            chunk = meta.column(leaf)
            start = _start(chunk)
            stop = start + chunk.total_compressed_size + OLD_HEADER_BYTES
            columns.append(look_at_pages(fd, start, stop, chunk.num_values))
    except Unclear:
        return 1  # pyarrow says what is wrong with it, or can read what we cannot
    finally:
        os.close(fd)
    for pages in columns:
        if pages.buffer_bytes > 2 * reading.buffer_bytes:
            need = -(-pages.buffer_bytes >> 21)
            raise Broken(
                f"has a page that takes {pages.buffer_bytes >> 20:,} MiB to unpack, where at most "
                f"{2 * reading.buffer_mb:,} are taken",
                f"write it with smaller pages, or allow it with --buffer-mb {need}",
                "takes too much memory",
            )
    return rows_at_once(columns, reading.document_bytes)
