"""Data of others: texts, tables, archives, tokenizers, prepared data sets, object stores."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.json_values import encoded, mutated
from tests.fuzz.raw_bytes import damaged
from tests.fuzz.reader import Finding, Folder, Target, reader
from tests.fuzz.samples import lines_of, one_file_of, texts_of

ROWS: list[Any] = [
    {"text": "one fish\ntwo fish", "prompt": "how many?", "id": 1},
    {"text": "é" * 40, "prompt": "", "meta": {"a": [1, 2]}},
    {"text": "", "prompt": "x"},
    {"text": "last", "prompt": "p", "id": None},
]


def tables_here() -> None:
    """Tables are looked at in this process and not in a child of it for each case: a child costs a second."""
    from shoal.data.prepare import table_look
    from shoal.data.prepare.bad_input import Problems
    from shoal.data.prepare.inputs import Input
    from shoal.data.prepare.readers_tables import table_pieces
    from shoal.data.prepare.units import Reading

    def look(asked: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        problems = Problems(asked["skip"])
        given = Reading(**asked["reading"]), asked["unit_bytes"], problems
        pieces = [list(table_pieces(Input(**one), *given)) for one in asked["inputs"]]
        return 0, [{"pieces": found, "skipped": problems.to_json()} for found in pieces]

    table_look._in_a_child = look


def documents_of(file: Path, fields: tuple[str, str | None] = ("text", "prompt")) -> Callable[[bytes], None]:
    """Reads a file's documents as `data prepare` does, first refusing and then leaving out what is bad."""
    from shoal.data.prepare.bad_input import Problems
    from shoal.data.prepare.inputs import expand
    from shoal.data.prepare.readers import documents
    from shoal.data.prepare.units import Reading, plan_units
    from shoal.errors import DataError

    tables_here()
    reading = Reading(*fields)

    def read(data: bytes) -> None:
        file.write_bytes(data)
        wrong: DataError | None = None
        for skip in (True, False):
            try:
                for unit in plan_units(expand([str(file)])[0], reading, Problems(skip)):
                    for piece in unit.pieces:
                        for document in documents(piece, reading, Problems(skip), lambda n: None):
                            document.text.encode()
                            (document.prompt or "").encode()
            except DataError as e:
                wrong = e
        if wrong is not None:
            raise wrong

    return read


@reader(
    "jsonl",
    "data.prepare.readers",
    "data.prepare.readers_bytes",
    "data.prepare.units",
    "data.prepare.inputs",
    quick=300,
    share=60,
)
def jsonl(folder: Path) -> Target:
    from shoal.errors import DataError

    return Target(lines_of(ROWS), documents_of(folder / "a.jsonl"), (DataError,))


@reader("text", "data.prepare.readers", "data.prepare.readers_bytes", quick=150, share=30)
def text(folder: Path) -> Target:
    from shoal.errors import DataError

    good = ("A line.\n" * 20 + "é\u2028 end\r\n\r\n\ufeff").encode()
    return Target(lambda rng: damaged(rng, good), documents_of(folder / "a.txt"), (DataError,))


@reader("packed-gz", "data.prepare.readers_bytes", quick=150, share=30)
def packed_gz(folder: Path) -> Target:
    from shoal.errors import DataError

    lines = lines_of(ROWS)

    def generate(rng: Random) -> bytes:
        inner = lines(rng) * rng.choice((1, 1, 50))
        packed = b"".join(gzip.compress(inner, 1, mtime=0) for _ in range(rng.choice((1, 1, 1, 3))))
        return packed if rng.random() < 0.3 else damaged(rng, packed, head=12)

    return Target(generate, documents_of(folder / "a.jsonl.gz"), (DataError,))


@reader("packed-zst", "data.prepare.readers_bytes", quick=150, share=30)
def packed_zst(folder: Path) -> Target:
    import zstandard

    from shoal.errors import DataError

    lines, packer = lines_of(ROWS), zstandard.ZstdCompressor()

    def generate(rng: Random) -> bytes:
        inner = lines(rng) * rng.choice((1, 1, 50))
        packed = b"".join(packer.compress(inner) for _ in range(rng.choice((1, 1, 1, 3))))
        return packed if rng.random() < 0.3 else damaged(rng, packed, head=12)

    return Target(generate, documents_of(folder / "a.jsonl.zst"), (DataError,))


@reader("bombs", "data.prepare.readers_bytes", quick=4, share=1, most_mib=320)
def bombs(folder: Path) -> Target:
    """Little that unpacks to much: the memory stays within its bound."""
    import zlib

    import zstandard

    from shoal.errors import DataError

    def packed(kind: str, unit: bytes, size_mib: int) -> bytes:
        """A mebibyte at a time: what is large must not be large here."""
        packer: Any = zlib.compressobj(1, wbits=31) if kind == "gz" else zstandard.ZstdCompressor(level=1).compressobj()
        many = unit * ((1 << 20) // len(unit))
        return b"".join([*(packer.compress(many) for _ in range(size_mib)), packer.flush()])

    def generate(rng: Random) -> bytes:
        unit = rng.choice((b"\n", b"a", b'{"text":"a"}\n', b"[", b'{"text":"'))
        size_mib = rng.choice((1, 4) if b"\n" in unit else (64, 512))  # lines take time each
        if rng.random() < 0.5:
            return b"z" + packed("zst", unit, size_mib)
        return b"g" + gzip.compress(b"", mtime=0) * rng.choice((0, 50_000)) + packed("gz", unit, min(size_mib, 64))

    read_gz, read_zst = (documents_of(folder / f"b.jsonl.{kind}", ("text", None)) for kind in ("gz", "zst"))
    return Target(generate, lambda data: (read_gz if data[:1] == b"g" else read_zst)(data[1:]), (DataError,))


@reader(
    "parquet",
    "data.prepare.readers_tables",
    "data.prepare.readers_parquet",
    quick=60,
    share=15,
    most_mib=320,
    isolated=True,
)
def parquet(folder: Path) -> Target:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shoal.errors import DataError

    samples = []
    for packing in ("none", "snappy", "zstd"):
        for table in (
            {"text": ["one", "two", None, "é" * 50] * 5, "prompt": ["a", "b", "c", None] * 5},
            {"text": ["one", "two"] * 200, "prompt": ["a", "b"] * 200},
            {"text": [b"one", b"\xff"], "prompt": ["a", "b"]},
            {"text": [1, 2], "prompt": [[1], [2, 3]]},
            {"other": ["x"]},
        ):
            out = io.BytesIO()
            pq.write_table(pa.table(table), out, compression=packing, row_group_size=7)
            samples.append(out.getvalue())

    def generate(rng: Random) -> bytes:
        data = rng.choice(samples)
        if rng.random() < 0.2:  # nearly every changed byte is noticed
            return data
        if rng.random() < 0.4:  # the footer, which says where everything is
            footer = int.from_bytes(data[-8:-4], "little")
            return data[: -8 - footer] + damaged(rng, data[-8 - footer :], head=footer)
        return damaged(rng, data)

    return Target(generate, documents_of(folder / "a.parquet"), (DataError,))


@reader(
    "datasets-folder",
    "data.prepare.inputs",
    "data.prepare.readers_tables",
    quick=15,
    share=3,
    most_mib=512,
    isolated=True,
)
def datasets_folder(folder: Path) -> Target:
    """What `datasets.save_to_disk` leaves: splits by name, a state, arrow files."""
    import datasets

    from shoal.data.prepare.bad_input import Problems
    from shoal.data.prepare.inputs import expand
    from shoal.data.prepare.readers import documents
    from shoal.data.prepare.units import Reading, plan_units
    from shoal.errors import ShoalError

    tables_here()
    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["one", "two"]})}).save_to_disk(
        str(folder / "good")
    )
    good = Folder(
        {
            str(p.relative_to(folder / "good")): p.read_bytes()
            for p in sorted((folder / "good").rglob("*"))
            if p.is_file()
        }
    )
    of_json = [name for name in good if name.endswith(".json")]

    def read(case: Folder) -> None:
        where = emptied(folder / "one")
        case.write(where)
        for unit in plan_units(expand([str(where)])[0], Reading(), Problems(False)):
            for piece in unit.pieces:
                list(documents(piece, Reading(), Problems(False), lambda n: None))

    return Target(lambda rng: one_file_of(good, of_json, rng), read, (ShoalError,))


@reader("rows", "data.prepare.readers", quick=800, share=300)
def rows(folder: Path) -> Target:
    """Prompts and answers: one row, as JSONL and tables give it."""
    from shoal.data.prepare.bad_input import Problems
    from shoal.data.prepare.readers import from_fields
    from shoal.data.prepare.units import Reading
    from shoal.errors import DataError

    reading = Reading("text", "prompt")

    def read(row: Any) -> None:
        if isinstance(row, dict) and (found := from_fields(row, reading, Problems(False), lambda: "a.jsonl:1")):
            found.text.encode()
            (found.prompt or "").encode()

    return Target(lambda rng: mutated(rng, rng.choice(ROWS)), read, (DataError,))


def data_set(folder: Path) -> Folder:
    """A small prepared data set with two shards, documents and masks."""
    import numpy as np

    from shoal.data.index import write_index
    from shoal.data.writer import ShardWriter

    infos = []
    folder.mkdir(parents=True)
    for number in range(2):
        with ShardWriter(folder, f"shard-{number:05d}", "uint16", with_mask=True) as writer:
            for n in (5, 9, 1, 30):
                writer.add(np.array([256, *range(n), 256], np.uint16), np.ones(n + 2, np.uint8))
            infos.append(writer.close())
    write_index(
        folder, infos, dtype="uint16", vocab_size=257, eos_id=256, start_id=256, tokenizer="byte", source={"a": 1}
    )
    return Folder({p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()})


@reader("index", "data.index", quick=800, share=200)
def index(folder: Path) -> Target:
    from shoal.data.index import index_in, parse_index
    from shoal.errors import DataError, SetupError

    good = json.loads(data_set(folder / "good")["index.json"])

    def read(data: bytes) -> None:
        (folder / "index.json").write_bytes(data)
        index_in(folder)
        found = parse_index(data, "data")
        again = parse_index(json.dumps(found.to_json()), "data")
        if again != found:
            raise Finding("an index that is another after a round trip")
        if any(type(n) is not int for n in (found.vocab_size, found.eos_id, found.tokens, found.documents)):
            raise Finding("a count that is no whole number")

    return Target(texts_of(good), read, (DataError, SetupError))


@reader(
    "data-set",
    "data.shards",
    "data.local_folder",
    "data.index",
    "data.windows",
    "data.packs",
    "cli.show",
    quick=100,
    share=15,
)
def shards(folder: Path) -> Target:
    """A folder of shards: files changed behind the checksums' back, and such whose checksums were made anew."""
    import numpy as np

    from shoal.cli.show import _vocabulary
    from shoal.data.shards import TokenShards
    from shoal.errors import ShoalError
    from shoal.spec import Run

    good = data_set(folder / "good")
    run = Run.model_validate({"name": "d", "data": {"train": str(folder / "one")}, "train": {"steps": 3}})

    def generate(rng: Random) -> Folder:
        roll = rng.random()
        if roll < 0.4:
            return one_file_of(good, ["index.json"], rng)
        name = rng.choice([n for n in good if n.endswith(".docs")])
        ends = np.frombuffer(good[name], "<i8").copy()
        at = rng.randrange(len(ends))
        how = rng.randrange(5)
        if how == 0:
            ends = ends[::-1].copy()
        elif how == 1:
            ends[at] = rng.choice((-1, 0, 1, 2**31, 2**62, -(2**62), ends[at] + 1, ends[at] - 1))
        elif how == 2:
            ends[at], ends[0] = ends[0], ends[at]
        elif how == 3:
            ends = np.repeat(ends[at], len(ends))
        else:
            ends += rng.choice((-1, 1))
        return resealed(good, name, ends.tobytes())

    def read(case: Folder) -> None:
        where = case.write(emptied(folder / "one"))
        _vocabulary(run)
        data = TokenShards.open(where)
        data.look()
        for i in range(len(data.index.shards)):
            ends = np.asarray(data.shard(i).ends)
            if len(ends) and (ends[0] <= 0 or (np.diff(ends) <= 0).any() or ends[-1] != data.index.shards[i].tokens):
                raise Finding("documents that end before they begin are taken")
        for start in range(0, data.tokens, 16):
            tokens, _, _ = data.read(start, min(data.tokens, start + 16))
            if len(tokens) and int(tokens.max()) >= data.vocab_size:
                raise Finding("ids beyond the vocabulary")
        data.verify()

    return Target(generate, read, (ShoalError,))


def resealed(good: Folder, name: str, content: bytes) -> Folder:
    """The data set with another content of one file, whose checksums are right."""
    import xxhash

    from shoal.data.index import ShardInfo, fingerprint_of

    index = json.loads(good["index.json"])
    ending = name.rpartition(".")[2]
    for shard in index["shards"]:
        if name.startswith(shard["name"]):
            shard[f"{ending}_xxh3"] = xxhash.xxh3_128_hexdigest(content)
    infos = [ShardInfo.from_json(s) for s in index["shards"]]
    index["fingerprint"] = fingerprint_of(infos, index["vocab_size"], index["dtype"])
    return Folder({**good, name: content, "index.json": json.dumps(index).encode()})


@reader("object-store", "data.remote", "data.cache", "objects", quick=25, share=3, most_mib=512)
def object_store(folder: Path) -> Target:
    """A data set in an object store whose objects are not what was uploaded, and a cache that a crash left behind."""
    from shoal.data import remote
    from shoal.data.shards import TokenShards
    from shoal.errors import ShoalError

    remote.TRIES = 1  # type: ignore[misc]  # the second try waits
    good = data_set(folder / "good")
    count = {"used": 100, "room": {"1": 5}}

    def generate(rng: Random) -> Folder:
        case = one_file_of(good, ["index.json"], rng)
        if rng.random() < 0.3:
            case["cache/lock"] = encoded(mutated(rng, count))
        return case

    def read(case: Folder) -> None:
        where = emptied(folder / "one")
        case.write(where)
        (where / "cache").mkdir(exist_ok=True)
        data = TokenShards.open(f"file://{where}", cache_dir=where / "cache")
        for i in range(len(data.index.shards)):
            data.shard(i)
        data.read(0, data.tokens)

    return Target(generate, read, (ShoalError,))


@reader(
    "prepare-folder",
    "data.prepare.out_folder",
    "data.prepare.workers",
    "data.prepare.child_errors",
    "data.prepare.tokenizer_train",
    quick=40,
    share=15,
)
def prepare_folder(folder: Path) -> Target:
    """What an interrupted `data prepare` left: its plan, and records of finished units."""
    from shoal.data.prepare.data_set import Options, prepare
    from shoal.data.prepare.out_folder import WORK_FOLDER
    from shoal.errors import ShoalError

    source = folder / "a.txt"
    source.write_text("one fish two fish")
    prepare([str(source)], folder / "good", Options(workers=1))
    good = Folder(
        {
            str(p.relative_to(folder / "good")): p.read_bytes()
            for p in sorted((folder / "good").rglob("*"))
            if p.is_file()
        }
    )
    of_json = [name for name in good if name.endswith(".json")]
    inner = [name for name in good if name.startswith(WORK_FOLDER)]

    def read(case: Folder) -> None:
        where = emptied(folder / "good2")
        case.write(where)
        prepare([str(source)], where, Options(workers=1))

    def generate(rng: Random) -> Folder:
        case = one_file_of(Folder({n: good[n] for n in inner}), of_json, rng)
        rest = {n: v for n, v in good.items() if n not in inner}
        if rng.random() < 0.5:
            rest.pop("index.json", None)
        return Folder({**rest, **case})

    return Target(generate, read, (ShoalError,))


def emptied(folder: Path) -> Path:
    """Without what the case before left there."""
    if folder.is_dir():
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.mkdir(exist_ok=True)
    return folder
