"""`diff`: what two checkpoints have in common, whatever mesh saved them, without reading more than it must."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.checkpoint.states import LAYOUTS, build, tensors_of, train
from tests.ranks import run_ranks

from shoal import checkpoint
from shoal.checkpoint import compare as comparing
from shoal.checkpoint.compare import Comparison, compare
from shoal.checkpoint.find import Found
from shoal.checkpoint.manifest import Corrupt
from shoal.checkpoint.rows import Slice
from shoal.cli.main import main

Captured = pytest.CaptureFixture[str]
Tensors = dict[str, torch.Tensor]


def saved(
    root: Path,
    tensors: Tensors,
    extra: dict[str, object] | None = None,
    piece_bytes: int = 1 << 20,
    block_bytes: int = 1 << 20,
) -> Found:
    checkpoint.save(root, 1, tensors, extra or {}, piece_bytes=piece_bytes, block_bytes=block_bytes)
    found = checkpoint.newest(root)
    assert found is not None
    return found


def trained(root: Path, layout: str, steps: int, piece_bytes: int) -> Found:
    def work(rank: int, world: int) -> None:
        model, optimizer = build(layout, seed=4)
        train(model, optimizer, steps=2)
        checkpoint.save(root, 2, tensors_of(model, optimizer), {}, piece_bytes=piece_bytes)
        if steps > 2:
            train(model, optimizer, steps=steps - 2)
            checkpoint.save(root, steps, tensors_of(model, optimizer), {}, piece_bytes=piece_bytes)

    run_ranks(work, LAYOUTS[layout])
    found = checkpoint.newest(root)
    assert found is not None
    return found


def test_the_same_state_of_two_meshes_is_equal_and_one_step_more_is_not(tmp_path: Path) -> None:
    a = trained(tmp_path / "a", "fsdp-2", 3, piece_bytes=100)
    b = trained(tmp_path / "b", "fsdp-4", 3, piece_bytes=72)
    same = compare(a, b)
    assert same.same
    assert same.equal == len(a.manifest.tensors)
    assert [fact.key for fact in same.facts] == ["ranks"]
    older = checkpoint.open_checkpoint(tmp_path / "b", checkpoint.Name(2, 0))
    other = compare(a, older)
    assert not other.same
    assert {c.name for c in other.changed} == set(a.manifest.tensors)
    whole_a, whole_b = checkpoint.read_full(a, ""), checkpoint.read_full(older, "")
    for c in other.changed:
        x, y = whole_a[c.name].double(), whole_b[c.name].double()
        gap = (x - y).abs()
        assert c.numbers is not None
        assert (c.numbers.count, c.numbers.of) == (int((x != y).sum()), x.numel())
        assert c.numbers.max_abs == float(gap.max())
        assert c.numbers.max_rel == float((gap / torch.maximum(x.abs(), y.abs()).clamp(min=1e-300)).max())


def only(found: Comparison, name: str) -> comparing.Numbers:
    (changed,) = (c for c in found.changed if c.name == name)
    assert changed.numbers is not None
    return changed.numbers


def test_every_kind_of_difference_is_told(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    a: Tensors = {
        "same": torch.arange(5.0),
        "nan": torch.tensor([1.0, nan, nan, inf]),
        "zero": torch.tensor([0.0, 1.0]),
        "half": torch.tensor([1.0, 2.0]).to(torch.bfloat16),
        "int": torch.tensor([1, 2**40]),
        "flag": torch.tensor([True, False]),
        "dtype": torch.ones(3),
        "shape": torch.ones(3),
        "gone": torch.ones(1),
        "scalar": torch.tensor(2.0),
    }
    b: Tensors = {
        **a,
        "nan": torch.tensor([1.0, nan, 3.0, 4.0]),
        "zero": torch.tensor([-0.0, 1.0]),
        "half": torch.tensor([1.0, 2.5]).to(torch.bfloat16),
        "int": torch.tensor([1, 2**40 + 3]),
        "flag": torch.tensor([True, True]),
        "dtype": torch.ones(3, dtype=torch.float64),
        "shape": torch.ones(4),
        "new": torch.ones(1),
        "scalar": torch.tensor(-2.0),
    }
    del b["gone"]
    found = compare(saved(tmp_path / "a", a), saved(tmp_path / "b", b))
    assert (found.only_a, found.only_b, found.equal) == (("gone",), ("new",), 1)
    assert only(found, "nan") == comparing.Numbers(2, 4, 0.0, 0.0, 2)
    assert only(found, "zero") == comparing.Numbers(1, 2, 0.0, 0.0, 0)
    assert only(found, "half") == comparing.Numbers(1, 2, 0.5, 0.2, 0)
    assert only(found, "int") == comparing.Numbers(1, 2, 3.0, 3 / (2**40 + 3), 0)
    assert only(found, "flag") == comparing.Numbers(1, 2, 1.0, 1.0, 0)
    assert only(found, "scalar") == comparing.Numbers(1, 1, 4.0, 2.0, 0)
    kinds = {c.name: c.kinds for c in found.changed if c.kinds}
    assert kinds == {"dtype": ("F32 [3]", "F64 [3]"), "shape": ("F32 [3]", "F32 [4]")}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    read: Callable[[Found, str, Slice], torch.Tensor] = comparing.read_slice

    def counting(found: Found, name: str, s: Slice) -> torch.Tensor:
        data = read(found, name, s)
        sizes.append(data.nbytes)
        return data

    monkeypatch.setattr(comparing, "read_slice", counting)
    return sizes


def test_equal_checksums_are_not_read_and_others_a_slice_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(100, 10)
    a = saved(tmp_path / "a", {"w": weight, "x": weight}, piece_bytes=400, block_bytes=400)
    b = saved(tmp_path / "b", {"w": weight, "x": weight + 1}, piece_bytes=400, block_bytes=400)
    cut = saved(tmp_path / "c", {"w": weight, "x": weight + 1}, piece_bytes=520, block_bytes=400)
    sizes = counted(monkeypatch)
    assert compare(a, b).equal == 1
    assert sum(sizes) == 2 * weight.nbytes
    sizes.clear()
    assert compare(b, cut).same
    assert max(sizes) <= 520
    assert sum(sizes) <= 4 * weight.nbytes + 4 * 520  # both tensors of both, the last slices perhaps twice


def test_damage_is_no_difference(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", {"w": torch.ones(50)}), saved(tmp_path / "b", {"w": torch.zeros(50)})
    path = tmp_path / "a" / str(a.name) / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="is damaged"):
        compare(a, b)


def test_the_command_tells_tensors_and_facts_and_leaves_with_0_or_1(tmp_path: Path, capsys: Captured) -> None:
    about = {"spec": {"seed": 1, "train": {"lr": 0.1}}, "environment": {"torch": "2.13"}}
    other = {"spec": {"seed": 1, "train": {"lr": 0.2}}, "environment": {"torch": "2.14", "gpu": "H200"}}
    weight = torch.ones(4, 4)
    moved = weight.clone()
    moved[0, 0] = 1.5
    saved(tmp_path / "a", {"model.w": weight, "optim.w.exp_avg": weight}, about)
    saved(tmp_path / "b", {"model.w": weight, "optim.w.exp_avg": moved}, other)
    pair = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["checkpoint", "diff", *pair]) == 1
    out = capsys.readouterr().out
    assert "optim.w.exp_avg: 1 of 16 numbers differ, by at most 0.5 (relative 0.333)" in out
    assert "spec.train.lr: 0.1 → 0.2" in out
    assert "environment.torch: 2.13 → 2.14" in out
    assert "seed" not in out
    assert main(["checkpoint", "diff", *pair, "--weights"]) == 0
    assert "1 tensor is equal" in capsys.readouterr().out
    assert main(["checkpoint", "diff", *pair, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["same"] is False
    assert told["changed"][0]["numbers"]["max_abs"] == 0.5
    assert {"key": "environment.gpu", "a": None, "b": "H200"} in told["facts"]
    assert main(["checkpoint", "diff", pair[0], pair[0]]) == 0
