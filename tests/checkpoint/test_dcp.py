"""Checkpoints of torch's own kind: read bit for bit, and nothing that is in them is ever run."""

from __future__ import annotations

import os
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from tests.checkpoint.states import LAYOUTS, build, pretend_to_train, same_bits, train
from tests.ranks import run_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import DTensor

from shoal.checkpoint.foreign import inert
from shoal.checkpoint.foreign.blob import Blob
from shoal.checkpoint.foreign.dcp import METADATA, Dcp, open_dcp
from shoal.checkpoint.layout import DTYPES, TORCH_DTYPES
from shoal.errors import CheckpointError


def save(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is what is meant
        torch_dcp.save(state, checkpoint_id=folder)
    return folder


def whole(dcp: Dcp, name: str) -> torch.Tensor:
    stored = dcp.tensors[name]
    tensor = torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype])
    for shard in stored.shards:
        box = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.shape, strict=True))
        tensor[box] = dcp.read(name, shard)
    return tensor


def test_tensors_of_every_kind_and_plain_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    numbers = torch.randn(6, 4)
    state: dict[str, Any] = {str(dtype): (numbers * 10).to(dtype) for dtype in DTYPES}
    state |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(5, 3).t(),
        "part": torch.randn(10, 10)[2:5, ::2],
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    plain = {"lr": 0.1, "betas": (0.9, 0.95), "name": "adamw", "none": None, "steps": [1, 2**80], "nested": {"a": True}}
    dcp = open_dcp(save(tmp_path / "dcp", {**state, "plain": plain}))
    expected = {name: t.detach().contiguous() for name, t in state.items()}
    assert same_bits({name: whole(dcp, name) for name in expected}, expected)
    values = {name: dcp.value(name) for name in dcp.values}
    assert values["plain.lr"] == 0.1
    assert values["plain.betas"] == [0.9, 0.95]
    assert values["plain.steps"] == [1, 2**80]
    assert values["plain.nested.a"] is True
    assert dcp.has_crc()


@pytest.mark.parametrize(("layout", "flat"), [("fsdp-2", True), ("fsdp-4", False), ("grid-4", True)])
def test_what_fsdp_saves_with_its_optimizer_comes_back_bit_for_bit(layout: str, flat: bool, tmp_path: Path) -> None:
    def work(rank: int, world: int) -> dict[str, torch.Tensor]:
        model, optimizer = build(layout, seed=2)
        if layout.startswith("grid"):
            pretend_to_train(optimizer)
        else:
            train(model, optimizer, steps=3)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        weights, moments = get_state_dict(model, optimizer, options=options)
        torch_dcp.save({"model": weights, "optim": moments}, checkpoint_id=tmp_path)
        expected = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            expected |= {f"optim.state.{name}.{key}": t for key, t in optimizer.state[p].items()}
        return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in expected.items()}

    expected = run_ranks(work, LAYOUTS[layout])[0]
    dcp = open_dcp(tmp_path)
    assert same_bits({name: whole(dcp, name) for name in dcp.tensors}, expected)
    assert len({shard.file for shard in dcp.tensors["model.embed.weight"].shards}) > 1


class Evil:
    """Unpickled, it calls `what(*args)`."""

    def __init__(self, what: Callable[..., Any], *args: Any) -> None:
        self.call = what, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def gadgets(mark: Path) -> dict[str, tuple[bytes, str]]:
    """Each of these, loaded by `pickle`, makes the file `mark`; and the words that name what it asked for."""
    touch = f"touch {mark}"
    code = f"open({str(mark)!r}, 'w')"
    # getattr(torch.Size, '__class__') … : attributes of what may be named, called.
    climb = b"cbuiltins\ngetattr\n(ctorch\nSize\nX\x07\x00\x00\x00__new__tR(ctorch\nSize\ntR."
    return {
        "os.system": (pickle.dumps(Evil(os.system, touch)), "posix.system"),
        "eval": (pickle.dumps(Evil(eval, code)), "builtins.eval"),
        "exec, protocol 0": (pickle.dumps(Evil(exec, code), protocol=0), r"opcode b'V'|builtins.exec|__builtin__.exec"),
        "inside getattr": (pickle.dumps(Evil(getattr, Evil(__import__, "os"), "system")), "builtins.__import__"),
        "operator": (b"coperator\nattrgetter\n(X\x06\x00\x00\x00system\x85R.", "operator.attrgetter"),
        "os by another name": (b"ctorch.serialization\nos.system\n(X\x01\x00\x00\x00.\x85R.", "torch.serialization.os"),
        "what getattr gives is called": (climb, "damaged"),
        "INST": (b"(X\x02\x00\x00\x00lsios\nsystem\n.", "opcode b'i'"),
        "OBJ": (b"(cos\nsystem\nX\x02\x00\x00\x00lso.", "os.system"),
        "an extension": (b"\x82\x01.", "opcode"),
    }


def gadget_names() -> list[str]:
    return list(gadgets(Path("x")))


@pytest.mark.parametrize("name", gadget_names())
def test_a_malicious_metadata_runs_nothing_and_is_told_by_what_it_asked_for(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "dcp", {"a": torch.ones(2)})
    mark = tmp_path / "executed"
    data, words = gadgets(mark)[name]
    (folder / METADATA).write_bytes(data)
    with pytest.raises(CheckpointError, match=words) as error:
        open_dcp(folder)
    assert str(folder / METADATA) in str(error.value)
    assert not mark.exists()


def test_the_gadgets_are_real(tmp_path: Path) -> None:
    """`pickle` does run them; otherwise the test above would prove nothing."""
    mark = tmp_path / "executed"
    for name in ("os.system", "eval"):
        pickle.loads(gadgets(mark)[name][0])
        assert mark.exists()
        mark.unlink()


def test_a_malicious_shard_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    folder = save(tmp_path / "dcp", {"a": torch.ones(2)})
    (shard,) = folder.glob("*.distcp")
    torch.save(Evil(os.system, f"touch {mark}"), shard)
    metadata = pickle.loads((folder / METADATA).read_bytes())  # torch's own, of a moment ago
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, shard.stat().st_size
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"'a' cannot be read .* it asks for posix\.system"):
        whole(open_dcp(folder), "a")
    assert not mark.exists()


def test_a_malicious_value_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    folder = save(tmp_path / "dcp", {"state": Evil(os.system, f"touch {mark}"), "a": torch.ones(2)})
    mark.unlink(missing_ok=True)  # DCP copies the object when it saves, which calls it
    dcp = open_dcp(folder)
    with pytest.raises(CheckpointError, match=r"'state'.*posix\.system"):
        dcp.value("state")
    assert torch.equal(whole(dcp, "a"), torch.ones(2))
    assert not mark.exists()


def blob_of(path: Path, value: object) -> Blob:
    torch.save(value, path)
    with open(path, "rb") as f:
        return Blob(os.dup(f.fileno()), 0, path.stat().st_size)


def test_a_bomb_of_references_is_refused(tmp_path: Path) -> None:
    bomb: list[Any] = []
    for _ in range(60):
        bomb = [bomb, bomb]
    loop: list[Any] = []
    loop.append(loop)
    for value in (bomb, loop):
        with pytest.raises(inert.Refused, match=r"too many parts|RecursionError"):
            blob_of(tmp_path / "blob", value).plain()


def test_missing_truncated_and_foreign_files_are_told_in_a_sentence(tmp_path: Path) -> None:
    folder = save(tmp_path / "dcp", {"a": torch.randn(100), "b": torch.randn(100)})
    (shard,) = folder.glob("*.distcp")
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has [\d,]+ bytes where its \.metadata needs [\d,]+"):
        open_dcp(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"lacks __0_0\.distcp"):
        open_dcp(folder)
    (folder / METADATA).unlink()
    with pytest.raises(CheckpointError, match=r"has no \.metadata"):
        open_dcp(folder)
    metadata = pickle.loads((save(tmp_path / "other", {"a": torch.ones(2)}) / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../dcp/__0_0.distcp"
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        open_dcp(folder)


def test_a_flipped_bit_of_a_weight_is_noticed_where_torch_loads_it(tmp_path: Path) -> None:
    folder = save(tmp_path / "dcp", {"a": torch.ones(1000)})
    (shard,) = folder.glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[data.index(b"\x00\x00\x80\x3f" * 100) + 42] ^= 1
    shard.write_bytes(data)
    loaded = {"a": torch.zeros(1000)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.load(loaded, checkpoint_id=folder)
    assert not torch.equal(loaded["a"], torch.ones(1000))
    dcp = open_dcp(folder)
    with pytest.raises(CheckpointError, match=r"'a' cannot be read .*CRC-32"):
        whole(dcp, "a")


def test_checksums_that_torch_was_told_to_leave_out_are_not_missed(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        folder = save(tmp_path / "dcp", {"a": torch.ones(3)})
    finally:
        torch.serialization.set_crc32_options(True)
    dcp = open_dcp(folder)
    assert not dcp.has_crc()
    assert torch.equal(whole(dcp, "a"), torch.ones(3))


def test_every_damaged_byte_ends_in_a_sentence_or_in_the_right_numbers(tmp_path: Path) -> None:
    """Never in another exception, in other numbers, or in memory that a damaged length asks for."""
    folder = save(tmp_path / "dcp", {"a": torch.arange(50.0), "b": torch.arange(8), "n": 7})
    rng = random.Random(0)
    for path in (folder / METADATA, *folder.glob("*.distcp")):
        good = path.read_bytes()
        for _ in range(400):
            at, bit = rng.randrange(len(good)), 1 << rng.randrange(8)
            path.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
            try:
                dcp = open_dcp(folder)
                found = {name: whole(dcp, name) for name in dcp.tensors}
                found |= {name: dcp.value(name) for name in dcp.values}
            except CheckpointError:
                continue
            if path.name != METADATA:
                assert torch.equal(found["a"], torch.arange(50.0)), (path.name, at, bit)
                assert torch.equal(found["b"], torch.arange(8)), (path.name, at, bit)
        path.write_bytes(good)


def test_nothing_can_be_said_about_what_is_no_pickle() -> None:
    for data in (b"", b".", b"hello", b"\x80\x04", b"(.", b"N0.", b"}(a.", b"\x8c\xff", b"h\x00.", b"]]a]a0" * 9):
        with pytest.raises(inert.Refused):
            inert.read(data, set())


class Special(torch.Tensor):
    """A tensor that is more than its numbers, as quantised ones are."""


def test_what_is_no_plain_tensor_is_refused(tmp_path: Path) -> None:
    for value in ({"a": torch.ones(2)}, [1], torch.ones(2, dtype=torch.complex64).conj(), Special([1.0])):
        with pytest.raises(inert.Refused):
            blob_of(tmp_path / "blob", value).tensor()
