"""Parquet, JSONL and packed text with some bytes changed: read, or refused in a sentence; never an exception of another
kind, never a crash, never without end."""

from __future__ import annotations

import gzip
import io
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from shoal.data.prepare.bad_input import Problems
from shoal.data.prepare.inputs import Input
from shoal.data.prepare.readers import documents
from shoal.data.prepare.readers_tables import table_pieces
from shoal.data.prepare.units import Piece, Reading
from shoal.errors import DataError
from tests.data.preparing import make_texts

PARQUET_CASES, LINE_CASES = 1000, 350
READING = Reading(max_document_mb=1)


def parquet(seed: int) -> bytes:
    """A small good file of one of the many kinds that there are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(seed)
    texts: list[str | None] = list(make_texts(rng.choice([3, 40, 200]), seed))
    if rng.random() < 0.3:
        texts[1] = None
    plain = rng.random() < 0.5
    encoding = {"text": rng.choice(["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])} if plain else None
    out = io.BytesIO()
    pq.write_table(
        pa.table({"text": texts, "n": list(range(len(texts)))}),
        out,
        compression=rng.choice(["none", "snappy", "zstd", "gzip", "brotli", "lz4"]),
        use_dictionary=not plain,
        column_encoding=encoding,
        row_group_size=rng.choice([20, 1000]),
        data_page_version=rng.choice(["1.0", "2.0"]),
        write_statistics=rng.random() < 0.5,
    )
    return out.getvalue()


def mutated(data: bytes, rng: random.Random, tail: int = 0) -> bytes:
    """With a few bytes changed, half of the time among the last `tail`; sometimes cut, or a part of it twice."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        begin = max(0, len(out) - tail) if tail and rng.random() < 0.5 else 0
        at = rng.randrange(begin, len(out))
        out[at] = rng.choice([out[at] ^ 1 << rng.randrange(8), rng.randrange(256), 0, 127, 255])
    kind = rng.random()
    if kind < 0.05:
        del out[rng.randrange(len(out)) :]
    elif kind < 0.1:
        at, size = rng.randrange(len(out)), rng.randrange(1, 40)
        out[at:at] = out[at : at + size]
    return bytes(out)


def read_all(path: Path, kind: str, packing: str, skip: bool) -> int:
    one = Input(str(path), kind, packing, path.stat().st_size)  # type: ignore[arg-type]
    problems = Problems(skip)
    if kind == "parquet":
        pieces = [Piece(one, *cut) for cut in table_pieces(one, READING, 1 << 20, problems)]
    else:
        pieces = [Piece(one, 0, one.size_bytes, one.size_bytes)] if one.size_bytes else []
    return sum(1 for piece in pieces for _ in documents(piece, READING, problems, lambda n: None))


def try_all(path: Path, kind: str, packing: str, seeds: list[bytes], cases: int, tail: int = 0) -> None:
    rng = random.Random(29)
    read = 0
    refused: list[str] = []
    for case in range(cases):
        path.write_bytes(mutated(rng.choice(seeds), rng, tail))
        try:
            read_all(path, kind, packing, skip=bool(case % 2))
            read += 1
        except DataError as e:
            refused.append(str(e))
    assert read
    assert len(refused) > cases // 20
    assert all(said.isprintable() and str(path) in said for said in refused)


def lines(seed: int) -> bytes:
    rng = random.Random(seed)
    rows = [{"id": rng.random(), "text": text, "more": [seed, {"a": None}]} for text in make_texts(30, seed, 12)]
    return "".join(json.dumps(row, ensure_ascii=bool(seed % 2)) + "\n" for row in rows).encode()


@pytest.mark.parametrize(
    ("packing", "pack"),
    [("", bytes), ("gz", gzip.compress), ("zst", lambda data: zstandard.ZstdCompressor().compress(data))],
    ids=["plain", "gz", "zst"],
)
def test_mutated_lines_are_read_or_refused(packing: str, pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    seeds = [pack(lines(seed)) for seed in range(6)]
    try_all(tmp_path / "a.jsonl", "jsonl", packing, seeds, LINE_CASES)


def test_mutated_parquet_is_read_or_refused(tmp_path: Path) -> None:
    """In a process of its own, as prepare does it: pyarrow may end the process."""
    command = [
        sys.executable,
        "-c",
        f"from tests.data.test_mutated import child; child({str(tmp_path / 'a.parquet')!r})",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]


def child(path: str) -> None:
    from shoal.data.prepare.memory_limit import hold_to, process_bytes

    hold_to(process_bytes(READING))
    try_all(Path(path), "parquet", "", [parquet(seed) for seed in range(24)], PARQUET_CASES, tail=600)
