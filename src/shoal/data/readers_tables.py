"""Rows of Parquet files and of Hugging Face datasets. Both packages are optional and imported only here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.data.inputs import Input
from shoal.data.problems import Problems
from shoal.data.units import MIN_UNIT_BYTES, Piece, Reading
from shoal.errors import DataError, SetupError, needs_extra

ROWS_AT_ONCE = 512

Row = Mapping[str, Any]
Rows = Iterator[tuple[Row, Callable[[], str]]]


def table_pieces(one: Input, reading: Reading, unit_bytes: int, problems: Problems) -> Iterator[tuple[int, int, int]]:
    """(start, stop, size_bytes) in row groups, rows, or shards of the dataset, whichever it has."""
    if one.kind == "parquet":
        yield from _row_groups(one, reading, problems)
    elif one.kind == "hf-disk":
        rows = len(_load_from_disk(one))
        step = max(1, rows * unit_bytes // max(one.size_bytes, 1))
        for lo in range(0, rows, step):
            hi = min(lo + step, rows)
            yield lo, hi, one.size_bytes * (hi - lo) // rows
    else:
        shards = max(1, _stream(one, reading).num_shards)
        for i in range(shards):
            yield i, i + 1, MIN_UNIT_BYTES  # how large a shard is, nobody says before it is read


def table_rows(piece: Piece, reading: Reading, problems: Problems, on_bytes: Callable[[int], None]) -> Rows:
    """Rows (as mappings of the fields that are needed, where the table has them) and where each is."""
    rows = {"parquet": _parquet_rows, "hf-disk": _disk_rows, "hf-stream": _stream_rows}[piece.input.kind]
    yield from rows(piece, reading, problems, on_bytes)


def _fields(reading: Reading) -> list[str]:
    return [f for f in (reading.text_field, reading.prompt_field) if f is not None]


def _row_groups(one: Input, reading: Reading, problems: Problems) -> Iterator[tuple[int, int, int]]:
    file = _parquet(one, problems)
    if file is None:
        return
    with file:
        meta = file.metadata
        missing = [f for f in _fields(reading) if f not in file.schema_arrow.names]
        if missing:
            has = ", ".join(file.schema_arrow.names[:8])
            what = f"has no column '{missing[0]}' (it has {has})"
            problems.found("missing field", lambda: one.path, what, "name the right one with --text-field")
        elif meta.num_rows == 0:
            problems.found("empty file", lambda: one.path, "has no rows", "remove it")
        else:
            for i in range(meta.num_row_groups):
                yield i, i + 1, max(1, one.size_bytes * meta.row_group(i).num_rows // meta.num_rows)


def _parquet(one: Input, problems: Problems) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise needs_extra("pyarrow", "data", "reading Parquet") from None
    try:
        return pq.ParquetFile(one.path, pre_buffer=False)
    except (pa.ArrowException, OSError) as e:
        what = f"is no Parquet file that can be read ({_first_line(e)})"
        problems.found("broken file", lambda: one.path, what, "fetch or write it again")
        return None


def _parquet_rows(piece: Piece, reading: Reading, problems: Problems, on_bytes: Callable[[int], None]) -> Rows:
    import pyarrow as pa

    file = _parquet(piece.input, problems)
    if file is None:
        return
    with file:
        groups = list(range(piece.start, piece.stop))
        before = sum(file.metadata.row_group(i).num_rows for i in range(piece.start))
        rows = sum(file.metadata.row_group(i).num_rows for i in groups)
        number = before
        try:
            # Threads of its own would fight with the other workers for the cores.
            for batch in file.iter_batches(
                ROWS_AT_ONCE, row_groups=groups, columns=_fields(reading), use_threads=False
            ):
                yield from _rows_of(batch.to_pydict(), len(batch), lambda n: f"{piece.input.path} row {n:,}", number)
                number += len(batch)
                on_bytes(piece.size_bytes * len(batch) // max(rows, 1))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
            place, what = number, f"cannot be read from row {number:,} on ({_first_line(e)})"
            problems.found("broken file", lambda: f"{piece.input.path} row {place:,}", what, "fetch or write it again")


def _rows_of(columns: Mapping[str, list[Any]], rows: int, where: Callable[[int], str], first: int) -> Rows:
    names = list(columns)
    for i in range(rows):
        yield {name: columns[name][i] for name in names}, lambda i=i: where(first + i)  # type: ignore[misc]  # mypy cannot infer i


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise needs_extra("datasets", "data", "reading a Hugging Face dataset") from None
    datasets.disable_progress_bars()
    return datasets


def _load_from_disk(one: Input) -> Any:
    try:
        return _datasets().load_from_disk(one.path)
    except Exception as e:  # whatever a damaged folder makes of the library
        raise DataError(f"{one.path} is no dataset that can be read ({_first_line(e)}); save it again.") from None


def _disk_rows(piece: Piece, reading: Reading, problems: Problems, on_bytes: Callable[[int], None]) -> Rows:
    table = _load_from_disk(piece.input)
    table = table.select_columns([f for f in _fields(reading) if f in table.column_names] or table.column_names)
    rows = piece.stop - piece.start
    for lo in range(piece.start, piece.stop, ROWS_AT_ONCE):
        hi = min(lo + ROWS_AT_ONCE, piece.stop)
        try:
            columns = table[lo:hi]
        except Exception as e:  # of pyarrow, of the file system, of the decoders of `datasets`
            where = partial("{} row {:,}".format, piece.input.path, lo)
            problems.found("broken file", where, f"cannot be read ({_first_line(e)})", "save the dataset again")
            return
        yield from _rows_of(columns, hi - lo, lambda n: f"{piece.input.path} row {n:,}", lo)
        on_bytes(piece.size_bytes * (hi - lo) // rows)


def pinned(one: Input, reading: Reading) -> Reading:
    """Of a dataset on the hub, the revision that is there now, so that a rerun reads the same thing."""
    if one.kind != "hf-stream" or Path(one.path).exists():
        return reading
    _datasets()
    import huggingface_hub

    try:
        info = huggingface_hub.HfApi().dataset_info(one.path, revision=reading.revision, timeout=15)
    except huggingface_hub.errors.HfHubHTTPError as e:
        raise DataError(f"the Hugging Face hub refuses the dataset {one.path} ({_first_line(e)}).") from None
    except Exception as e:  # the transport's own errors: no network, no name server, offline mode
        raise _unreachable(one, e) from None
    return replace(reading, revision=info.sha)


def _stream(one: Input, reading: Reading) -> Any:
    """Rows as they arrive: nothing but the shard that is read has to fit on this machine."""
    datasets = _datasets()
    try:
        stream = datasets.load_dataset(
            one.path, reading.config, split=reading.split, revision=reading.revision, streaming=True
        )
    except (ConnectionError, TimeoutError) as e:
        raise _unreachable(one, e) from None
    except Exception as e:  # an unknown split, a loading script, no data files: the library says which
        raise DataError(f"the dataset {one.path} cannot be opened ({_first_line(e)}).") from None
    return stream


def _unreachable(one: Input, e: Exception) -> SetupError:
    return SetupError(
        f"the Hugging Face hub cannot be reached to read {one.path} ({_first_line(e)}); fetch it where there is a "
        f"network (`hf download --repo-type dataset {one.path} --local-dir FOLDER`) and prepare the folder."
    )


def _stream_rows(piece: Piece, reading: Reading, problems: Problems, on_bytes: Callable[[int], None]) -> Rows:
    stream = _stream(piece.input, reading)
    shards = max(1, stream.num_shards)
    shard = stream.shard(num_shards=shards, index=piece.start) if shards > 1 else stream
    name = f"{piece.input.path} ({reading.split}, shard {piece.start})"
    n = -1
    try:
        for n, row in enumerate(shard):
            yield row, lambda n=n: f"{name} row {n:,}"  # type: ignore[misc]  # mypy cannot infer n
    except Exception as e:  # the parsers behind `datasets` raise their own classes, which have no common root
        place, what = n + 1, f"cannot be read ({_first_line(e)})"
        problems.found("broken file", lambda: f"{name} row {place:,}", what, "fetch it again")
    on_bytes(piece.size_bytes)


def _first_line(e: BaseException) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0].rstrip(".")
