"""Rows of Parquet files and of Hugging Face datasets. Both packages are optional and imported only here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.data.broken import TOO_LONG, Broken, Unreadable, first_line, shown
from shoal.data.prepare.arrow_rows import Row, rows_of
from shoal.data.prepare.bad_input import Problems
from shoal.data.prepare.inputs import Input
from shoal.data.prepare.memory_limit import process_bytes
from shoal.data.prepare.readers_bytes import Growth
from shoal.data.prepare.readers_parquet import parquet_rows, row_groups
from shoal.data.prepare.units import MIN_UNIT_BYTES, Piece, Reading
from shoal.errors import DataError, SetupError, needs_extra

ROWS_AT_ONCE = 512

Rows = Iterator[tuple[Row, Callable[[], str]]]


def table_pieces(one: Input, reading: Reading, unit_bytes: int, problems: Problems) -> Iterator[tuple[int, int, int]]:
    """(start, stop, size_bytes) in row groups, rows, or shards of the dataset, whichever it has. Called in a process of
    its own (shoal.data.prepare.table_look)."""
    if one.kind == "parquet":
        yield from row_groups(one, reading, problems)
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
    rows = {"parquet": parquet_rows, "hf-disk": _disk_rows, "hf-stream": _stream_rows}[piece.input.kind]
    yield from rows(piece, reading, problems, on_bytes)


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
        inside = isinstance(e, AttributeError | TypeError | LookupError)
        why = "its files are not as `datasets` writes them" if inside else first_line(e)
        raise DataError(f"{shown(one.path)} is no dataset that can be read ({why}); save it again.") from None


def _disk_rows(piece: Piece, reading: Reading, problems: Problems, on_bytes: Callable[[int], None]) -> Rows:
    path = piece.input.path
    table = _load_from_disk(piece.input)
    table = table.select_columns([f for f in reading.fields if f in table.column_names] or table.column_names)
    table = table.with_format("arrow")
    growth = Growth.of(piece, reading)
    rows = piece.stop - piece.start
    for lo in range(piece.start, piece.stop, ROWS_AT_ONCE):
        hi = min(lo + ROWS_AT_ONCE, piece.stop)
        n = lo
        try:
            for batch in table[lo:hi].to_batches():
                batch.validate(full=True)  # a wrong offset in the file would be followed anywhere in memory
                for row in rows_of(batch, reading, growth):
                    yield row, lambda n=n: f"{path} row {n:,}"  # type: ignore[misc]  # mypy cannot infer n
                    n += 1
        except Broken as e:
            problems.found(e.reason, lambda: path, f"{e} (from row {n:,} on)", e.advice)
            return
        except Exception as e:  # of pyarrow, of the file system, of the decoders of `datasets`
            where = partial("{} row {:,}".format, path, n)
            problems.found("broken file", where, f"cannot be read ({first_line(e)})", "save the dataset again")
            return
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
        raise DataError(f"the Hugging Face hub refuses the dataset {one.path} ({first_line(e)}).") from None
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
    except MemoryError:
        raise DataError(
            f"the dataset {one.path} takes more memory to open than a process may have "
            f"({process_bytes(reading) >> 20:,} MiB); allow more with --buffer-mb."
        ) from None
    except Exception as e:  # an unknown split, a loading script, no data files: the library says which
        raise DataError(f"the dataset {one.path} cannot be opened ({first_line(e)}).") from None
    return stream


def _unreachable(one: Input, e: Exception) -> SetupError:
    return SetupError(
        f"the Hugging Face hub cannot be reached to read {one.path} ({first_line(e)}); fetch it where there is a "
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
            yield _short(row, reading), lambda n=n: f"{name} row {n:,}"  # type: ignore[misc]  # mypy cannot infer n
    except Exception as e:  # the parsers behind `datasets` raise their own classes, which have no common root
        place, what = n + 1, f"cannot be read ({first_line(e)})"
        problems.found("broken file", lambda: f"{name} row {place:,}", what, "fetch it again")
    on_bytes(piece.size_bytes)


def _short(row: Row, reading: Reading) -> Row:
    """The fields that are needed, where there are such; a text that is too long is left out."""
    found = {name: row[name] for name in reading.fields if name in row}
    for name, value in found.items():
        if isinstance(value, str) and len(value) > reading.document_bytes:
            found[name] = Unreadable("record too long", f"is longer than {reading.max_document_mb:,} MiB", TOO_LONG)
    return found if len(found) == len(reading.fields) else row
