"""Documents from plain text and JSON lines, one after another. Tables are in readers_tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from shoal import values
from shoal.data.broken import TOO_LONG, Broken, Unreadable, some
from shoal.data.prepare.bad_input import Problems
from shoal.data.prepare.readers_bytes import BLOCK_BYTES, Growth, file_blocks, parts_of_a_document, records, unpacked
from shoal.data.prepare.units import Piece, Reading
from shoal.plain_file import open_plain

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
# A value of a line of JSON takes up to 130 bytes as a Python object. Lines that are shorter than LONG_LINE_BYTES cannot
# hold too many; of longer ones so many are read as take eight times the memory of the longest line.
LONG_LINE_BYTES = 1 << 20
BYTES_A_VALUE = 16
_ONE_A_LINE = "write one object a line (`jq -c '.[]'` turns an array into that)"


class Document(NamedTuple):
    text: str
    prompt: str | None  # comes before the text and is no training target


def documents(
    piece: Piece, reading: Reading, problems: Problems, on_bytes: Callable[[int], None]
) -> Iterator[Document]:
    """Every document of the piece that is not blank. `on_bytes` hears how much of `piece.size_bytes` has been read."""
    kind = piece.input.kind
    if kind == "text":
        yield from _text(piece, reading, problems, on_bytes)
    elif kind == "jsonl":
        yield from _jsonl(piece, reading, problems, on_bytes)
    else:
        from shoal.data.prepare.readers_tables import table_rows

        for row, where in table_rows(piece, reading, problems, on_bytes):
            document = from_fields(row, reading, problems, where)
            if document is not None:
                yield document


def _text(piece: Piece, reading: Reading, problems: Problems, on_bytes: Callable[[int], None]) -> Iterator[Document]:
    separator = reading.separator
    for n, begin, record in _records(piece, reading, separator, problems, on_bytes):
        if n == 1 and piece.start == 0:
            record = record.removeprefix(_BOM)
        text = _decoded(record, problems, piece, n, begin)
        if text is None:
            continue
        if separator is not None:
            # The line breaks around a separator belong to it, or `\n\n\n` would leave some where four stand.
            text = text.strip("\r\n")
        if text and not text.isspace():
            yield Document(text, None)


def _jsonl(piece: Piece, reading: Reading, problems: Problems, on_bytes: Callable[[int], None]) -> Iterator[Document]:
    for n, begin, record in _records(piece, reading, "\n", problems, on_bytes):
        if n == 1 and piece.start == 0:
            record = record.removeprefix(_BOM)
        line = _decoded(record, problems, piece, n, begin)
        if line is None or not line or line.isspace():
            continue

        where = partial(place, piece, n, begin)
        try:
            if len(record) > LONG_LINE_BYTES:
                values.look_at_count(record, reading.document_bytes // BYTES_A_VALUE)
            row = json.loads(line)
        except values.BadValue as e:
            problems.found("record too long", where, f"cannot be read ({e.reason})", TOO_LONG)
            continue
        except (ValueError, RecursionError) as e:
            advice = _ONE_A_LINE if line.lstrip().startswith("[") else "correct it"
            reason = e.msg if isinstance(e, json.JSONDecodeError) else str(e)
            column = f" at column {e.colno}" if isinstance(e, json.JSONDecodeError) else ""
            problems.found("invalid JSON", where, f"is not valid JSON ({reason}{column})", advice)
            continue
        if not isinstance(row, dict):
            what = f"is {_type(row)} and not a JSON object"
            problems.found("invalid JSON", where, what, _ONE_A_LINE)
            continue
        document = from_fields(row, reading, problems, where)
        del record, line, row  # whoever works on the document now needs the room
        if document is not None:
            yield document


def from_fields(
    row: Mapping[str, Any], reading: Reading, problems: Problems, where: Callable[[], str]
) -> Document | None:
    values: list[str | None] = []
    for option, name in (("--text-field", reading.text_field), ("--prompt-field", reading.prompt_field)):
        if name is None:
            values.append(None)
            continue
        if name not in row:
            what = f"has no field '{name}' (it has {some(row)})"
            problems.found("missing field", where, what, f"name the right one with {option}")
            return None
        value = row[name]
        if isinstance(value, Unreadable):
            problems.found(value.reason, where, f"{value.what} in the field '{name}'", value.advice)
            return None
        if not isinstance(value, str):
            what = f"has {_type(value)} in the field '{name}', where text is expected"
            problems.found("field is not text", where, what, f"name another with {option}")
            return None
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                # JSON can spell half of a surrogate pair, which no UTF-8 has.
                problems.found("invalid UTF-8", where, f"has half a surrogate pair in the field '{name}'")
                return None
        values.append(value)
    text, prompt = values
    if not text or text.isspace():
        return None
    return Document(text, prompt)


def _records(
    piece: Piece, reading: Reading, separator: str | None, problems: Problems, on_bytes: Callable[[int], None]
) -> Iterator[tuple[int, int, bytes]]:
    """(1, 2, 3 …; where it begins in the piece; bytes) of each record that could be read. Blank ones may be missing."""
    path = piece.input.path
    blocks = file_blocks(path, piece.start, piece.stop, on_bytes)
    blocks = unpacked(blocks, piece.input.packing, Growth.of(piece, reading), reading.buffer_bytes)
    n, begin = 0, 0
    try:
        first = next(blocks, b"")
        if not first:
            problems.found("empty file", lambda: path, "is empty", "remove it")
            return
        blocks = chain((first,), blocks)
        stream: Iterator[tuple[int, int, bytes | None]] = (
            ((i, *part) for i, part in enumerate(parts_of_a_document(blocks), start=1))
            if separator is None
            else records(blocks, separator.encode(), reading.document_bytes)
        )
        for n, begin, record in stream:
            if record is None:
                what = f"is longer than {reading.max_document_mb:,} MiB"
                problems.found("record too long", partial(place, piece, n, begin), what, TOO_LONG)
            else:
                yield n, begin, record
    except Broken as e:
        readable = f" after {n:,} readable records" if n and separator is not None else ""
        problems.found(e.reason, lambda: path, f"{e}{readable}", e.advice)
    except OSError as e:
        problems.found("unreadable file", lambda: path, f"cannot be read ({e.strerror})", "make it readable")


def _decoded(record: bytes, problems: Problems, piece: Piece, n: int, begin: int) -> str | None:
    try:
        return record.decode()
    except UnicodeDecodeError as e:
        at = begin + e.start
        utf16 = " (it looks like UTF-16: `iconv -f UTF-16 -t UTF-8`)" if record[:2] in _UTF16 else ""
        where = partial(place, piece, n, at, in_bytes=True)
        problems.found("invalid UTF-8", where, f"is not UTF-8 ({e.reason})", f"convert it{utf16}")
        return None


def place(piece: Piece, n: int, begin: int, in_bytes: bool = False) -> str:
    """`file:line` of what begins at this byte of the piece's nth record. Reads the file up to there."""
    path = piece.input.path
    if piece.input.packing:
        # Only whole files are packed; counting their lines again would mean to unpack them again.
        byte = f"byte {begin:,} of the unpacked text"
        return f"{path}:{n}" if piece.input.kind == "jsonl" else f"{path} (record {n}, {byte})"
    at = piece.start + begin
    lines, left = 1, at
    with open(open_plain(path), "rb") as f:
        while left and (block := f.read(min(BLOCK_BYTES, left))):
            lines += block.count(b"\n")
            left -= len(block)
    return f"{path}:{lines}" + (f" (byte {at:,})" if in_bytes else "")


def _type(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a string",
    }
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
