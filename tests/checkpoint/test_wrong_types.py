"""A seal says that nothing has changed, not that it was right: other types are damage, and the older one is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import checkpoint
from shoal.checkpoint import Name, ledger
from shoal.checkpoint.faulty import Corrupt
from shoal.checkpoint.foreign import inert
from shoal.checkpoint.foreign.dcp import METADATA, open_dcp
from shoal.checkpoint.manifest import decode, seal
from shoal.checkpoint.memory.generations import read_extra, seal_extra
from shoal.checkpoint.part import decode_part
from shoal.checkpoint.store import Folder
from shoal.errors import CheckpointError

BAD: list[Any] = [None, [], {}, "x", -1, 2.5, 1 << 62, 10**30, True, [None], {"a": []}]


def sealed(said: dict[str, Any]) -> bytes:
    said = {key: value for key, value in said.items() if key != "xxh3_128"}
    head = json.dumps(said).encode().removesuffix(b"}")
    return head + seal(head)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        extra = {"step": step, "skips": [[1, 2]], "data": ["ab"], "eval_loss": 1.5}
        checkpoint.save(root, step, {"w": torch.full((4, 3), float(step))}, extra, term=1)
    return root


def spots(said: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = said.items() if isinstance(said, dict) else enumerate(said) if isinstance(said, list) else ()
    return [at, *(spot for key, value in inner for spot in spots(value, (*at, key)))]


def test_no_wrong_type_in_a_manifest_is_anything_but_damage(root: Path) -> None:
    whole = json.loads((root / str(Name(2, 1)) / "manifest.json").read_bytes())
    taken = []
    for spot in spots(whole)[1:]:
        for new in BAD:
            said = json.loads(json.dumps(whole))
            inner = said
            for key in spot[:-1]:
                inner = inner[key]
            if inner[spot[-1]] == new and type(inner[spot[-1]]) is type(new):
                continue
            inner[spot[-1]] = new
            try:
                decode(sealed(said))
                taken.append((spot, new))
            except Corrupt:
                pass
            except CheckpointError as e:
                assert "newer Shoal" in str(e)  # noqa: PT017  # a version above ours
    assert {spot[0] for spot, _ in taken} <= {"step", "term", "saved_at", "extra", "xxh3_128", "files"}, taken
    free = {spot[1] for spot, _ in taken if spot[0] == "extra" and len(spot) > 1}
    assert free <= {"step", "skips", "eval_loss", "data"}, "unknown names may be anything; these have their types"


@pytest.mark.parametrize(
    ("field", "new"), [("world", "1"), ("extra", {"skips": [[5, 1]]}), ("extra", {"data": 5}), ("saved_at", 1e308)]
)
def test_the_older_one_is_used(root: Path, tmp_path: Path, field: str, new: Any) -> None:
    import shutil

    mine = tmp_path / "run"
    shutil.copytree(root, mine)
    file = mine / str(Name(2, 1)) / "manifest.json"
    file.write_bytes(sealed({**json.loads(file.read_bytes()), field: new}))
    tensors = {"w": torch.zeros(4, 3)}
    found = checkpoint.restore(mine, tensors)
    assert found is not None
    assert (found.step, float(tensors["w"][0, 0])) == (1, 1.0)
    assert "cannot be understood" in str(found.skipped[0])


def test_parts_extras_and_ledger_entries_of_the_wrong_type(tmp_path: Path) -> None:
    for said in ({}, {"rank": []}, {"block_bytes": 1e999}, {"file": 5, "rank": 0, "world": 1, "block_bytes": 8}):
        with pytest.raises(Corrupt):
            decode_part(sealed(said) if "block_bytes" not in said else sealed({**said, "layout": [1]}))
    for extra in (b"5", b'{"skips": 7}', b'{"step": "1"}', b"[" * 5000 + b"]" * 5000):
        with pytest.raises(Corrupt):
            read_extra(seal_extra(extra))
    store = Folder(tmp_path)
    store.put(f"ledger/quarantined-{Name(1, 1)}.json", b"[" * 100_000)
    assert ledger.quarantine_reason(store, Name(1, 1)) == "no reason is recorded"
    store.put(f"ledger/published-{Name(1, 1)}.json", sealed({"world": 1e999, "bytes": [], "manifest_bytes": 0}))
    assert ledger.summary(store, Name(1, 1)) is None


def bomb(depth: int) -> bytes:
    """A tuple of the one before it, twice, and so on; then a table with that as its key."""
    return (
        b"\x80\x04}("
        + b")\x94"
        + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(depth))
        + b"Nu."
    )


def test_a_tuple_of_itself_64_deep_ends_at_once() -> None:
    with pytest.raises(inert.Refused, match="when it is written out"):
        inert.read(bomb(64), set())
    assert inert.read(b"\x80\x04}(K\x01K\x02\x86Nu.", set()) == {(1, 2): None}


def test_deep_tuples_and_costly_keys_are_refused() -> None:
    deep = b"\x80\x04}(" + b")" + b"\x85" * 200_000 + b"Nu."
    with pytest.raises(inert.Refused, match="deep"):
        inert.read(deep, set())
    wide = b"\x80\x04((" + b"K\x01" * 900_000 + b"t\x94"
    again = b"(" + b"".join(b"h\x00N" for _ in range(40)) + b"u"
    with pytest.raises(inert.Refused):
        inert.read(wide + b"}" + again + b".", set())
    with pytest.raises(inert.Refused, match="numbers that no checkpoint"):
        inert.read(b"\x80\x04}(\x8a\x09" + b"\xff" * 8 + b"\x01Nu.", set())


@pytest.mark.parametrize("file", ["../x", "a\0b", "..", ".", "/etc/passwd", "", "x" * 300])
def test_a_name_that_leads_elsewhere_is_refused_in_a_sentence(tmp_path: Path, file: str) -> None:
    import warnings

    import torch.distributed.checkpoint as torch_dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    import pickle

    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = file
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        open_dcp(tmp_path)
