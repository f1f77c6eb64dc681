"""Checkpoints: manifests and parts with a right seal and a wrong content, folders, torch's own, the memory tier."""

from __future__ import annotations

import base64
import io
import json
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from tests.fuzz.json_values import encoded, mutated
from tests.fuzz.of_data import emptied
from tests.fuzz.raw_bytes import damaged
from tests.fuzz.reader import Finding, Folder, Target, reader
from tests.fuzz.samples import one_file_of, texts_of
from tests.fuzz.verbs import shoal


def saved(folder: Path) -> Folder:
    """The files of one small checkpoint, with its ledger."""
    import torch

    from shoal import checkpoint

    torch.manual_seed(0)
    tensors = {"model.a": torch.randn(5, 3), "model.b": torch.randn(7), "optim.a.step": torch.tensor(3.0)}
    extra = {"step": 12, "spec": {"model": {"dim": 32, "layers": 1, "heads": 2}}, "loss": 2.5}
    checkpoint.save(folder, 12, tensors, extra, 1)
    return files_of(folder)


def sealed(value: Any) -> bytes:
    """As JSON with its right checksum."""
    from shoal.checkpoint.seals import seal

    head = encoded(value).removesuffix(b"}")
    return head + seal(head)


def without_seal(data: bytes) -> Any:
    value = json.loads(data)
    del value["xxh3_128"]
    return value


@reader(
    "manifest",
    "checkpoint.manifest",
    "checkpoint.fields",
    "checkpoint.version_1",
    "checkpoint.rows",
    quick=500,
    share=150,
)
def manifest(folder: Path) -> Target:
    from shoal.checkpoint.manifest import Corrupt, decode, encode
    from shoal.errors import CheckpointError

    files = saved(folder / "good")
    new = without_seal(next(data for name, data in files.items() if name.endswith("manifest.json")))
    new["saved_at"] = 1.8e9  # of no clock
    there = Path(__file__).parents[1] / "checkpoint" / "version_1"
    old = without_seal(next(there.glob("step-*/manifest.json")).read_bytes())

    def generate(rng: Random) -> bytes:
        data = sealed(mutated(rng, new if rng.random() < 0.7 else old))
        return data if rng.random() < 0.9 else damaged(rng, data)

    def read(data: bytes) -> None:
        found = decode(data)
        again = decode(encode(found))
        if replace(again, listed=None) != replace(found, listed=None):  # of version 1, whose slices have no equality:
            raise Finding("a manifest that is another after a round trip")
        for name in list(found.tensors)[:4]:  # they are compared here
            if list(found.rows.slices(name)) != list(again.rows.slices(name)):
                raise Finding("a tensor that lies elsewhere after a round trip")

    return Target(generate, read, (Corrupt, CheckpointError))


@reader(
    "parts",
    "checkpoint.part",
    "checkpoint.memory.intake",
    "checkpoint.memory.generations",
    "checkpoint.memory.tier",
    "checkpoint.memory.keeper",
    "checkpoint.memory.neighbour",
    quick=500,
    share=150,
)
def parts(folder: Path) -> Target:
    """What a rank says of its file, and what goes with it to another node's memory."""
    import torch

    from shoal.checkpoint.blocks import file_of
    from shoal.checkpoint.faulty import Corrupt
    from shoal.checkpoint.memory.generations import read_extra
    from shoal.checkpoint.memory.intake import Unfit, _stretches
    from shoal.checkpoint.part import Part, decode_part, encode_part
    from shoal.checkpoint.saving import contents_of

    contents = contents_of({"model.a": torch.zeros(5, 3), "model.b": torch.zeros(7)})
    size = 64 + contents.layout.sizes()[0]
    starts = len(range(64, size, contents.layout.block_bytes))
    good = without_seal(
        encode_part(
            Part(0, 1, file_of(size, 64, "0" * 32, contents.layout.block_bytes, bytes(16) * starts), contents.packed)
        )
    )
    layout = json.loads(zlib.decompress(base64.b64decode(good["layout"])))

    def generate(rng: Random) -> bytes:
        roll = rng.random()
        if roll < 0.2:
            return b"x" + sealed(mutated(rng, {"extra": {"step": 3, "a": [1, {"b": None}]}}))
        held = (
            good
            if roll < 0.6
            else {**good, "layout": base64.b64encode(zlib.compress(encoded(mutated(rng, layout)), 1)).decode()}
        )
        data = sealed(mutated(rng, held) if roll < 0.6 else held)
        return b"p" + (data if rng.random() < 0.9 else damaged(rng, data))

    def read(data: bytes) -> None:
        if data[:1] == b"x":
            read_extra(data[1:])
            return
        part = decode_part(data[1:])
        part.layout.sizes()
        _stretches(data[1:], b"", 0, 1, size)

    return Target(generate, read, (Corrupt, Unfit))


@reader("memory-talk", "checkpoint.memory.tier", "checkpoint.memory.neighbour", quick=300, share=60)
def memory_talk(folder: Path) -> Target:
    """What rank 0 tells the others of who holds what, and what keepers answer."""
    from shoal.checkpoint.memory.tier import Memory
    from shoal.checkpoint.names import Name

    good = {"addresses": ["", "a:1"], "ranks": [[0, 100, [0]], [1, 200, [1, 0]]]}

    def read(data: bytes) -> None:
        tier = Memory.__new__(Memory)
        sources: list[Any] = [SimpleNamespace(kept=dict), SimpleNamespace(kept=dict)]
        tier._addresses, tier._sources, tier._second, tier._seen = ["", "a:1"], sources, False, {}
        tier.hear(Name(3, 1), data.decode("utf-8", "replace"))

    # What no other rank can make sense of is no copy: `hear` says so as for one that is gone.
    return Target(texts_of(good), read, (), (FileNotFoundError,))


@reader("keeper", "checkpoint.memory.keeper", "checkpoint.memory.intake", quick=200, share=40)
def keeper(folder: Path) -> Target:
    """What a keeper of other nodes' memory is asked, by one who knows the token."""
    from shoal.checkpoint.memory.keeper import Keeper
    from shoal.wire import Broken

    good = [
        {"do": "list"},
        {"do": "part", "step": 3, "term": 1, "rank": 0},
        {"do": "extra", "step": 3, "term": 1},
        {"do": "read", "step": 3, "term": 1, "rank": 0, "at": 0, "count": 5},
        {"do": "copy", "step": 3, "term": 1, "rank": 0, "world": 1, "bytes": 10, "part": 5, "extra": 0},
    ]
    asked = Keeper(folder / "kept" if (folder / "kept").mkdir() is None else folder, bytes(32))

    def read(case: Any) -> None:
        if isinstance(case, dict):
            sock = SimpleNamespace(
                sendall=lambda data: None, recv_into=lambda into: 0, sendfile=lambda *_: 0, settimeout=lambda s: None
            )
            asked._answer(sock, case)  # type: ignore[arg-type]
        asked._folder.joinpath("keeper.json").write_bytes(encoded(case))
        asked._still_named()

    return Target(lambda rng: mutated(rng, rng.choice(good)), read, (Broken,))


@reader("ledger", "checkpoint.ledger", "checkpoint.find", quick=200, share=30)
def ledger(folder: Path) -> Target:
    from shoal.checkpoint import ledger as book
    from shoal.checkpoint.names import Name
    from shoal.checkpoint.store import store_of
    from shoal.errors import ShoalError

    store = store_of(folder / "store")
    book.note_published(store, Name(3, 1), book.Summary(1, 100, 50, 2.5))
    book.quarantine(store, Name(4, 1), "why")
    where = folder / "store" / "ledger"
    summary = {"world": 1, "bytes": 100, "manifest_bytes": 50, "eval_loss": 2.5}

    def generate(rng: Random) -> bytes:
        text = (
            sealed(mutated(rng, summary)) if rng.random() < 0.6 else encoded(mutated(rng, {"reason": "x", "at": 1.5}))
        )
        return text if rng.random() < 0.85 else damaged(rng, text)

    def read(data: bytes) -> None:
        for name in ("published-step-00000003-term-1.json", "quarantined-step-00000004-term-1.json"):
            (where / name).write_bytes(data)
        book.read(store)
        book.summary(store, Name(3, 1))
        if len(book.quarantine_reason(store, Name(4, 1))) > 5000:
            raise Finding("a reason without an end")

    return Target(generate, read, (ShoalError,))


@reader(
    "checkpoint-folder",
    "checkpoint.find",
    "checkpoint.loading",
    "checkpoint.files",
    "checkpoint.store",
    "checkpoint.foreign.shapes",
    quick=40,
    share=8,
)
def checkpoint_folder(folder: Path) -> Target:
    """`checkpoint verify`, `ls` and `diff` on a folder somebody has changed."""
    from shoal.errors import ShoalError

    good = saved(folder / "good")
    name = next(n for n in good if n.endswith("manifest.json"))
    held = without_seal(good[name])
    of_json = [n for n in good if n.endswith(".json")]

    def generate(rng: Random) -> Folder:
        if rng.random() < 0.5:
            return Folder({**good, name: sealed(mutated(rng, held))})
        return one_file_of(good, of_json, rng)

    def read(case: Folder) -> None:
        where = case.write(emptied(folder / "one"))
        for verb in (["ls"], ["verify"]):
            try:
                shoal("checkpoint", *verb, str(where))
            except ShoalError as e:
                wrong: ShoalError | None = e
            else:
                wrong = None
        if wrong is not None:
            raise wrong

    return Target(generate, read, (ShoalError, OSError))


@reader("inert", "checkpoint.foreign.inert", quick=500, share=200)
def pickles(folder: Path) -> Target:
    """Pickles as plain data; nothing of one is ever run."""
    from shoal.checkpoint.foreign import inert
    from shoal.checkpoint.foreign.dcp import _NAMES, METADATA

    data = dcp_files(folder / "dcp")[METADATA]
    marks = [
        b"(",
        b"}",
        b"]",
        b"u",
        b"e",
        b"s",
        b"a",
        b"R",
        b"\x81",
        b"b",
        b"t",
        b"\x94",
        b"h\x00",
        b"h\x01",
        b"j\x05\x00\x00\x00",
        b"\x85",
        b"\x86",
        b"Q",
        b"\x8e",
    ]
    marks += [
        b"\x80\x04",
        b"\x8a\xff",
        b"\x8b\xff\xff\xff\x7f",
        b"X\xff\xff\xff\xff",
        b"0",
        b"N",
        b"K\x05",
        b"cos\nsystem\n",
        b"q\x00",
    ]

    def generate(rng: Random) -> bytes:
        roll = rng.random()
        if roll < 0.5:
            return damaged(rng, data)
        held = bytearray(data if roll < 0.8 else b"\x80\x04N.")
        for _ in range(rng.randrange(1, 12)):
            at = rng.randrange(len(held))
            held[at:at] = rng.choice(marks) * rng.choice((1, 1, 1, 2, 60))
        return bytes(held)

    return Target(generate, lambda case: inert.read(case, _NAMES), (inert.Refused,))


@reader(
    "dcp",
    "checkpoint.foreign.dcp",
    "checkpoint.foreign.blob",
    "checkpoint.foreign.incoming",
    "checkpoint.foreign.bring_in",
    quick=60,
    share=8,
)
def dcp(folder: Path) -> Target:
    """A checkpoint as torch writes it, as `checkpoint import` reads it."""
    from shoal.checkpoint.foreign.dcp import METADATA, open_dcp
    from shoal.errors import ShoalError

    good = dcp_files(folder / "dcp")

    def generate(rng: Random) -> Folder:
        name = METADATA if rng.random() < 0.6 else rng.choice(tuple(good))
        return Folder({**good, name: damaged(rng, good[name])})

    def read(case: Folder) -> None:
        found = open_dcp(case.write(emptied(folder / "one")))
        for name, stored in found.tensors.items():
            for shard in stored.shards:
                found.read(name, shard)
        for name in found.values:
            found.value(name)

    return Target(generate, read, (ShoalError,))


def dcp_files(folder: Path) -> Folder:
    import torch
    import torch.distributed.checkpoint as torch_dcp

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is what is meant
        torch_dcp.save({"a": torch.randn(4, 3), "b": {"step": 3, "t": torch.ones(2).bfloat16()}}, checkpoint_id=folder)
    return Folder({p.name: p.read_bytes() for p in sorted(folder.iterdir())})


@reader(
    "zero",
    "checkpoint.foreign.blob",
    "checkpoint.foreign.inert",
    "checkpoint.foreign.zero.tag",
    "checkpoint.foreign.zero.state_file",
    "checkpoint.foreign.zero.module",
    "checkpoint.foreign.zero.ranks",
    "checkpoint.foreign.zero.flat",
    "checkpoint.foreign.zero.weights",
    "checkpoint.foreign.zero.universal",
    quick=60,
    share=12,
)
def zero(folder: Path) -> Target:
    """Checkpoints as DeepSpeed writes them, as `checkpoint import` reads them."""
    from shoal.checkpoint.foreign.bring_in import _of_deepspeed
    from shoal.checkpoint.foreign.zero.tag import tag_of
    from shoal.errors import ShoalError

    good = list(zero_folders(folder))

    def generate(rng: Random) -> Folder:
        case = Folder(rng.choice(good))
        name = rng.choice([n for n in case if n.endswith(".pt")] if rng.random() < 0.9 else tuple(case))
        roll = rng.random()
        if roll < 0.1:
            del case[name]
        elif roll < 0.2:
            case[name] = case[rng.choice(tuple(case))]
        elif roll < 0.4 or not name.endswith(".pt"):
            case[name] = damaged(rng, case[name])
        else:
            case[name] = with_pickle(case[name], lambda data: damaged(rng, data))
        return case

    def read(case: Folder) -> None:
        found = tag_of(case.write(emptied(folder / "one")))
        if found is None:
            return
        source = _of_deepspeed(found, None, ())
        for tensor in source.tensors.values():
            if tuple(tensor.whole().shape) != tensor.shape:
                raise Finding("a tensor that is not what it was said to be")

    return Target(generate, read, (ShoalError,))


def with_pickle(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A file of `torch.save` with another pickle, whose CRC-32 is right."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w") as into:
        for info in archive.infolist():
            part = archive.read(info)
            into.writestr(info.filename, change(part) if info.filename.endswith("data.pkl") else part)
    return out.getvalue()


def zero_folders(folder: Path) -> Iterator[Folder]:
    import torch

    from tests.checkpoint.zero_folders import TAG, write, write_universal, zero_files

    torch.manual_seed(0)
    groups, frozen, shared = [{"a": torch.randn(3, 2), "b": torch.randn(5)}], {"f": torch.randn(3)}, {"c": "a"}
    for stage in (2, 3):
        files = zero_files(stage, 2, groups, frozen, shared, {"table": torch.randn(2)})
        yield files_of(write(folder / f"zero-{stage}", files))
    yield files_of(write_universal(folder / "universal", groups[0]))
    bare = write_universal(folder / "bare", groups[0], bare=True)
    for name, value in zero_files(3, 2, groups, frozen).items():
        if "model" in name:
            torch.save(value, bare / TAG / name)
    yield files_of(bare)


def files_of(folder: Path) -> Folder:
    return Folder({str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()})
