"""Looks at the pages of a Parquet column before pyarrow reads them: how many rows may be read at once.

A few bytes of Parquet can stand for any amount of text: rows that name one entry of a dictionary, values that repeat
the one before. What the footer says of sizes may be a lie, and pyarrow makes room for what a page says of itself. So
the headers of the pages are read first, which takes some 20 microseconds for a megabyte of text. They are in Thrift's
compact protocol: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md, and parquet.thrift.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

MOST_ROWS = 512
_HEADER_BYTES = (1 << 9, 1 << 14, 1 << 20)  # tried one after another: some writers put whole texts in as statistics
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_PLAIN, _DELTA_LENGTH = 0, 6  # encodings whose pages hold what they stand for


class Page(NamedTuple):
    rows: int
    packed_bytes: int
    bytes: int
    repeats: bool
    """One row of it may stand for as much as all of the page, or the largest entry of the dictionary."""


class Pages(NamedTuple):
    data: list[Page]
    dictionary_bytes: int

    @property
    def buffer_bytes(self) -> int:
        """What a reader needs to hold one page of it, as it is packed and as it is not, and the dictionary twice: as it
        was read and as it was decoded."""
        return 2 * self.dictionary_bytes + max((p.packed_bytes + p.bytes for p in self.data), default=0)


class Unclear(Exception):
    """These are no page headers."""


def look_at_pages(fd: int, start: int, stop: int, values: int) -> Pages:
    """The pages of a column chunk with so many values, which lies between these places of the file."""
    pages: list[Page] = []
    dictionary_bytes = seen = 0
    while seen < values:
        if start >= stop:
            raise Unclear
        header, size = _header(fd, start)
        kind, unpacked, packed = (_count(header, i) for i in (1, 2, 3))
        if kind == _DICTIONARY:
            dictionary_bytes += unpacked
        elif kind in (_DATA, _DATA_V2):
            inner = header.get(5 if kind == _DATA else 8)
            rows, encoding = _count(inner, 1), _count(inner, 2 if kind == _DATA else 4)
            pages.append(Page(rows, packed, unpacked, encoding not in (_PLAIN, _DELTA_LENGTH)))
            seen += rows
        start += size + packed
    return Pages(pages, dictionary_bytes)


def _count(fields: object, number: int) -> int:
    count = fields.get(number) if isinstance(fields, dict) else None
    if not isinstance(count, int) or count < 0:
        raise Unclear
    return count


def rows_at_once(columns: Sequence[Pages], most_bytes: int) -> int:
    """How many rows can be read together without more than so many bytes in any column; at least 1."""
    rows = MOST_ROWS
    while rows > 1 and any(_worst(pages, rows) > most_bytes for pages in columns):
        rows //= 2
    return rows


def _worst(pages: Pages, rows: int) -> int:
    """The most that any `rows` rows in a row may hold."""

    def cost(page: Page) -> int:
        return min(rows, page.rows) * max(page.bytes, pages.dictionary_bytes) if page.repeats else page.bytes

    worst = held = held_rows = begin = 0
    for page in pages.data:
        held += cost(page)
        # The pages before this one are touched together with it as long as all between them are not enough.
        while begin < len(pages.data) and held_rows - pages.data[begin].rows >= rows - 1 and held_rows > 0:
            held -= cost(pages.data[begin])
            held_rows -= pages.data[begin].rows
            begin += 1
        held_rows += page.rows
        worst = max(worst, held)
    return worst


def _header(fd: int, at: int) -> tuple[dict[int, Any], int]:
    for size in _HEADER_BYTES:
        data = os.pread(fd, size, at)
        reader = _Compact(data)
        try:
            return reader.struct(), reader.at
        except IndexError:
            if len(data) < size:
                break
    raise Unclear


class _Compact:
    """Numbers and structs of a message; texts, lists and the rest are passed over."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        if depth > 8:
            raise Unclear
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._number()
            fields[number] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind in (4, 5, 6):
            return self._number()
        if kind in (3, 7):
            return self._skip(1 if kind == 3 else 8)
        if kind == 8:
            return self._skip(self._varint())
        if kind == 12:
            return self.struct(depth + 1)
        raise Unclear  # no header of a page has lists, sets or maps

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise Unclear
        return value | byte << shift

    def _number(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _skip(self, size: int) -> None:
        if self.at + size > len(self._data):
            raise IndexError
        self.at += size
