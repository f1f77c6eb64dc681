"""Small files that stand for a great deal: what a stranger can send to fill the memory of who reads it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

RLE = 1
MIB = 1 << 20


def zstd_frame(blocks: list[tuple[int, bytes, int]], window_log: int) -> bytes:
    """A frame of blocks (kind, bytes, length), with a window of 2 ** window_log bytes, without a checksum."""
    head = b"\x28\xb5\x2f\xfd\x00" + bytes([(window_log - 10) << 3])
    body = b"".join(
        ((i == len(blocks) - 1) | kind << 1 | length << 3).to_bytes(3, "little") + data
        for i, (kind, data, length) in enumerate(blocks)
    )
    return head + body


def zstd_of(byte: bytes, size: int, window_log: int = 23) -> bytes:
    """So much of one byte, four bytes for each 128 KiB."""
    return zstd_frame([(RLE, byte, 1 << 17)] * (size >> 17), window_log)


def varint(n: int) -> bytes:
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def number(n: int) -> bytes:
    return varint(n << 1 if n >= 0 else (-n << 1) - 1)


def parquet_footer(elements: list[bytes], rows: int = 0, groups: bytes = b"\x0c") -> bytes:
    """A file that is nothing but a footer. Thrift's compact protocol: see shoal.data.prepare.parquet_pages."""
    schema = b"\x19" + (bytes([len(elements) << 4 | 12]) if len(elements) < 15 else b"\xfc" + varint(len(elements)))
    meta = b"\x15\x02" + schema + b"".join(elements) + b"\x16" + number(rows) + b"\x19" + groups + b"\x00"
    return b"PAR1" + meta + struct.pack("<I", len(meta)) + b"PAR1"


GROUP = b"\x35\x02\x18\x01a\x15\x02\x00"  # an optional group 'a' with one child
TEXT = b"\x15\x0c\x25\x02\x18\x04text\x00"  # an optional column of byte arrays
ROOT = b"\x48\x01s\x15\x02\x00"


def deep_schema(path: Path) -> None:
    path.write_bytes(parquet_footer([GROUP] * 20_000 + [TEXT]))


def many_row_groups(path: Path, claimed: int = 1 << 31) -> None:
    path.write_bytes(parquet_footer([ROOT, TEXT], rows=1, groups=b"\xfc" + varint(claimed)))


def empty_row_groups(path: Path, count: int = 900_000) -> None:
    """Row groups of one byte each, for which a reader makes room of hundreds."""
    path.write_bytes(parquet_footer([ROOT, TEXT], rows=1, groups=b"\xfc" + varint(count) + b"\x00" * count))


def one_entry(path: Path, size: int = 20 * MIB, rows: int = 512) -> None:
    """Under a thousand bytes: all rows name one entry of the dictionary."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * rows), ["x" * size])})
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30, store_schema=False)


def same_prefix(path: Path, size: int = MIB, rows: int = 80) -> None:
    """Each value is the one before it, over again."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": ["x" * size] * rows})
    encoding = {"text": "DELTA_BYTE_ARRAY"}
    pq.write_table(table, path, compression="zstd", use_dictionary=False, column_encoding=encoding)


def large_page(path: Path, size: int = 20 * MIB) -> None:
    """One page for all of it, packed well."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": ["x" * MIB] * (size // MIB)})
    pq.write_table(table, path, compression="zstd", use_dictionary=False, data_page_size=1 << 30)


def page_that_claims(path: Path, claimed: int = (1 << 31) - 1) -> None:
    """A good file whose page says that it unpacks to 2 GiB."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["whale"]}), path, use_dictionary=False, write_statistics=False)
    data = bytearray(path.read_bytes())
    at = 4  # field 1 is the type, field 2 the size
    assert data[at : at + 3 : 2] == b"\x15\x15"
    old = varint_length(data, at + 3)
    new = number(claimed)
    data[at + 3 : at + 3 + old] = new
    path.write_bytes(data)


def varint_length(data: bytes | bytearray, at: int) -> int:
    size = 1
    while data[at + size - 1] & 128:
        size += 1
    return size


def nested_values(opening: str) -> Callable[[Path], None]:
    """A line under the limit that becomes 25 times as much in Python."""

    def write(path: Path) -> None:
        path.write_text('{"a": [' + ",".join([opening] * (15 * MIB // (len(opening) + 1))) + '], "text": "x"}\n')

    return write


def of(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)
