"""Checkpoints that DeepSpeed has written come in whole, and nothing that is in their pickles is ever run."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.test_bring_in import SMALL, made, newest, same_weights, started_from, taken_in
from tests.checkpoint.zero_folders import TAG, Files, write, write_universal, zero_files
from torch import Tensor

from shoal import checkpoint
from shoal.checkpoint.foreign.bring_in import open_source
from shoal.checkpoint.foreign.zero import flat, state_file
from shoal.errors import CheckpointError
from shoal.spec.shape import shape_of

THEIRS = Path(__file__).with_name("deepspeed_0_19_8")
OPTIM, MODEL = "zero_pp_rank_{}_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"
NUMBERS = torch.Generator().manual_seed(0)


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=NUMBERS)


GROUPS = [{"a.weight": some(5, 3), "b.weight": some(7), "one": some()}, {"c.weight": some(2, 2, 3)}]
FROZEN, BUFFERS = {"frozen": some(3, 3)}, {"table": some(4), "half": some(3).half(), "counted": torch.tensor([1, 2])}
SHARED = {"head.weight": "a.weight"}
ALL = {**GROUPS[0], **GROUPS[1], **FROZEN, "table": BUFFERS["table"], "half": BUFFERS["half"].float()}
ALL["head.weight"] = ALL["a.weight"]


def files(stage: int, world: int = 3) -> Files:
    return zero_files(stage, world, GROUPS, FROZEN, SHARED, BUFFERS)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """As they would be written."""
    with ExitStack() as stack:
        source = open_source(str(folder), folder.parent, stack)
    return {name: tensor.whole() for name, tensor in source.tensors.items()}


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: t for name, t in tensors_of(folder).items() if not name.startswith("optimizer.")}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", ["zero-2", "zero-3"])
def test_what_deepspeed_wrote_is_what_its_own_script_makes_of_it(kind: str) -> None:
    """Written by DeepSpeed 0.19.8 (tests/zero/theirs.py), with its own classes and a program's in the pickles."""
    same(weights_of(THEIRS / kind), load_file(THEIRS / f"{kind}.safetensors"))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_tensor_is_found_again_on_any_number_of_processes(stage: int, world: int, tmp_path: Path) -> None:
    found = tensors_of(write(tmp_path / "zero", files(stage, world)))
    same({name: t for name, t in found.items() if "optimizer." not in name}, ALL)
    for name, tensor in {**GROUPS[0], **GROUPS[1]}.items():
        assert torch.equal(found[f"optimizer.state.{name}.exp_avg"], tensor + 1)
        assert torch.equal(found[f"optimizer.state.{name}.exp_avg_sq"], tensor + 2)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_tensor_that_is_read_in_pieces_is_the_same(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces end in the middle of what a process has, and of a row."""
    monkeypatch.setattr(flat, "PIECE_BYTES", 8)
    monkeypatch.setattr(state_file, "_CRC_BYTES", 16)
    same(weights_of(write(tmp_path / "zero", files(stage))), ALL)


@pytest.mark.parametrize("kind", ["zero 2", "zero 3", "universal", "universal of zero 3"])
def test_a_run_starts_from_what_deepspeed_trained(kind: str, tmp_path: Path) -> None:
    shape = shape_of(SMALL)
    original = made(shape, seed=7)
    state = dict(original.state_dict())
    if kind.startswith("universal"):
        folder = write_universal(tmp_path / "theirs", state, bare=kind != "universal")
        for name, value in zero_files(3, 2, [state]).items():
            if "model" in name:
                torch.save(value, folder / TAG / name)
    else:
        matrices = {name: t for name, t in state.items() if t.dim() > 1}
        others = {name: t for name, t in state.items() if t.dim() < 2}
        folder = write(tmp_path / "theirs", zero_files(int(kind[-1]), 3, [matrices, others]))
    brought = taken_in(folder, tmp_path / "out", SMALL)
    assert (brought.step, brought.convention, brought.startable) == (7, "Shoal", True)
    assert any("nothing in them was run" in note for note in brought.notes)
    assert same_weights(started_from(tmp_path / "out", shape), original)
    moments = checkpoint.read_full(newest(tmp_path / "out"), "optim.")
    assert torch.equal(moments["embed.weight.exp_avg_sq"], state["embed.weight"] + 2)
    assert len(moments) == 2 * len(state)


def test_the_folder_of_one_checkpoint_is_taken_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "zero", files(2))
    (folder / "latest").unlink()
    same(weights_of(folder / TAG), ALL)


def test_weights_alone_are_taken_under_any_names(tmp_path: Path) -> None:
    brought = taken_in(write(tmp_path / "zero", files(2)), tmp_path / "out", weights_only=True)
    assert (brought.convention, brought.tensors) == (None, len(ALL))


def test_frozen_tensors_of_zero_1_are_not_lost(tmp_path: Path) -> None:
    """It lists none, and has them in the model's state dict alone; DeepSpeed's own script leaves them out."""
    held = files(1)
    held[MODEL] |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
    same(weights_of(write(tmp_path / "zero", held)), ALL)


def test_tensors_between_which_there_is_padding_are_found(tmp_path: Path) -> None:
    held = zero_files(2, 2, [{"a": some(3), "gap": some(2), "b": some(6)}])
    held[MODEL]["param_shapes"][0].pop("gap")
    for rank in range(2):
        held[OPTIM.format(rank)]["optimizer_state_dict"]["param_alignment_paddings"] = [[2, 0]]
    expected = held[MODEL]["module"]
    same(weights_of(write(tmp_path / "zero", held)), dict(expected))


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


def test_what_a_pickle_asks_for_is_not_done_and_not_in_the_way(tmp_path: Path) -> None:
    held = files(3)
    for value in held.values():
        value |= {"mine": Evil(tmp_path / "ran"), "seen": {1, 2}, "counted": Counter("abb")}
    same(weights_of(write(tmp_path / "zero", held)), ALL)
    held[OPTIM.format(1)]["optimizer_state_dict"]["fp32_flat_groups"][0] = Evil(tmp_path / "ran")
    with pytest.raises(CheckpointError, match=r"rank_1.*something else where a tensor should be"):
        tensors_of(write(tmp_path / "evil", held))
    assert not (tmp_path / "ran").exists()


def test_an_optimizer_that_is_not_adamw_is_left_out_with_a_note(tmp_path: Path) -> None:
    held = files(2)
    del held[OPTIM.format(1)]["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["exp_avg_sq"]
    folder = write(tmp_path / "zero", held)
    same(tensors_of(folder), ALL)
    with ExitStack() as stack:
        notes = open_source(str(folder), tmp_path, stack).notes
    assert any("not AdamW's" in note for note in notes)
    assert any("'counted'" in note or "counted (I64)" in note for note in notes)


def optim(held: Files, rank: int = 1) -> dict[str, Any]:
    state: dict[str, Any] = held[OPTIM.format(rank)]["optimizer_state_dict"]
    return state


def second(held: Files) -> dict[str, Any]:
    state: dict[str, Any] = held["zero_pp_rank_1_mp_rank_00_model_states.pt"]
    return state


Wrong = tuple[int, Callable[[Files], object], str]
WRONG: dict[str, Wrong] = {
    "a rank in the middle is missing": (2, lambda f: f.pop(OPTIM.format(1)), r"lacks the optim_states file of rank 1"),
    "the last rank is missing": (
        2,
        lambda f: f.pop(OPTIM.format(2)),
        r"cut over 3 processes, and there are files of 2",
    ),
    "a rank too many": (
        3,
        lambda f: f.update({OPTIM.format(3): f[OPTIM.format(2)]}),
        "has 4 optim_states and 3",
    ),
    "files of another world": (
        2,
        lambda f: optim(f).update(partition_count=[4, 4]),
        r"rank_1_\S+ is not read: its groups are cut over 4 processes, and there are files of 3",
    ),
    "no optimizer": (2, lambda f: [f.pop(OPTIM.format(r)) for r in range(3)], "no optim_states file of ZeRO's"),
    "no model": (2, lambda f: f.pop(MODEL), "has 3 optim_states and 0 model_states files"),
    "no ZeRO": (2, lambda f: f[MODEL].update(param_shapes=None), "saved without ZeRO"),
    "tensor parallel": (
        2,
        lambda f: f.update({"zero_pp_rank_0_mp_rank_01_optim_states.pt": {}}),
        r"mp_rank_01_optim_states.pt: tensors cut over several processes .* ds_to_universal.py",
    ),
    "tensor parallel, by its word": (2, lambda f: f[MODEL].update(mp_world_size=2), r"cut over 2 processes \(tensor"),
    "a pipeline": (2, lambda f: f.update({"layer_01-model_states.pt": {}}), "layers on the stages of a pipeline"),
    "experts": (
        2,
        lambda f: f.update({"layer_0_expert_1_mp_rank_00_model_states.pt": {}}),
        "expert_1.*: experts on processes of their own",
    ),
    "experts' optimizer": (
        2,
        lambda f: f.update({"expp_rank_0_mp_rank_00_optim_states.pt": {}}),
        "experts on processes of their own",
    ),
    "two precisions": (
        2,
        lambda f: f.update({"bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt": {}}),
        "files of two kinds of checkpoints",
    ),
    "a shape that is too long": (
        2,
        lambda f: f[MODEL]["param_shapes"][0].update({"b.weight": torch.Size([700])}),
        r"its shapes need 716 numbers, and a flat group has 23",
    ),
    "a shape that is too short": (
        2,
        lambda f: f[MODEL]["param_shapes"][0].update({"b.weight": torch.Size([1])}),
        r"its shapes need 17 numbers, and a flat group has 23",
    ),
    "a shape beyond all numbers": (
        3,
        lambda f: [f[n]["param_shapes"][0].update({"b.weight": (1 << 60, 1 << 60)}) for n in f if "model" in n],
        r"the sum of its shapes needs .* and one has 13",
    ),
    "a negative shape": (2, lambda f: f[MODEL]["param_shapes"][0].update({"one": (-1,)}), "the shape of one is none"),
    "a name in two groups": (
        2,
        lambda f: f[MODEL]["param_shapes"][1].update({"a.weight": torch.Size([5, 3])}),
        "its shapes name a.weight twice",
    ),
    "a group too few": (2, lambda f: optim(f)["single_partition_of_fp32_groups"].pop(), "different numbers of flat"),
    "padding beside the shapes": (
        2,
        lambda f: optim(f, 0).update(param_alignment_paddings=[[0]]),
        "or not their paddings",
    ),
    "a group that is not flat": (
        3,
        lambda f: optim(f)["fp32_flat_groups"].__setitem__(0, torch.zeros(2, 2)),
        r"shape \[2, 2\], which is not flat",
    ),
    "a group that is longer on one rank": (
        3,
        lambda f: optim(f)["fp32_flat_groups"].__setitem__(0, torch.zeros(50)),
        r"the sum of its shapes needs 13 numbers of each process, and one has 54",
    ),
    "another stage": (2, lambda f: optim(f).update(fp32_flat_groups=[]), "of ZeRO 3, and the model's file not"),
    "no numbers in float32": (2, lambda f: optim(f).pop("single_partition_of_fp32_groups"), "no weights in float32"),
    "a model of another step": (3, lambda f: second(f).update(global_steps=8), "of another model or step"),
    "a model of another shape": (
        3,
        lambda f: second(f)["param_shapes"][0].update(one=torch.Size([1])),
        "of another model or step",
    ),
    "a frozen part that is too long": (
        3,
        lambda f: second(f)["frozen_param_fragments"].update(frozen=torch.zeros(9)),
        r"the shape of frozen needs 3 numbers of each process, and one has 9",
    ),
    "a frozen part that is missing": (3, lambda f: second(f)["frozen_param_fragments"].clear(), "are not those of its"),
    "a table that is none": (2, lambda f: f[MODEL].update(shared_params=[1]), "shared_params is no table of names"),
}


@pytest.mark.parametrize("case", WRONG)
def test_files_that_do_not_fit_each_other_are_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    stage, change, said = WRONG[case]
    held = files(stage)
    change(held)
    with pytest.raises(CheckpointError, match=said) as told:
        tensors_of(write(tmp_path / "zero", held))
    assert "\n" not in str(told.value)


def test_a_small_file_cannot_fill_a_disk(tmp_path: Path) -> None:
    held = zero_files(2, 1, [{"a": torch.zeros(10_000)}], shared={f"copy{i}": "a" for i in range(500)})
    with pytest.raises(CheckpointError, match=r"its tensors would be 20,120,000 bytes, out of files of 1\d\d,\d\d\d"):
        tensors_of(write(tmp_path / "zero", held))


@pytest.mark.parametrize("said", ["../elsewhere", "..", "/", "", "a\0b", "gone", "\xff" * 90, "x" * 999])
def test_a_latest_that_names_no_folder_beside_it_is_refused(said: str, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", files(2))
    with pytest.raises(CheckpointError, match="latest"):
        tensors_of(write(tmp_path / "zero", files(2), latest=said))


def test_bytes_that_changed_and_files_that_end_are_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "zero", files(2))
    flipped = shutil.copytree(folder, tmp_path / "flipped") / TAG / OPTIM.format(1)
    data = bytearray(flipped.read_bytes())
    at = data.index(GROUPS[1]["c.weight"].flatten()[5].numpy().tobytes())
    data[at] ^= 1
    flipped.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank_1.*CRC-32 does not match"):
        tensors_of(tmp_path / "flipped")
    file = folder / TAG / OPTIM.format(0)
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=r"rank_0.*damaged, or not what torch.save writes"):
        tensors_of(folder)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"rank_0.*a FIFO"):
        tensors_of(folder)


def test_a_pickle_without_an_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "zero", files(2))
    monkeypatch.setattr(state_file, "_MOST_PICKLE", 100)
    with pytest.raises(CheckpointError, match="its pickle has more than 100 bytes"):
        tensors_of(folder)


@pytest.mark.parametrize("bare", [False, True])
def test_universal_tensors_of_another_shape_are_refused(bare: bool, tmp_path: Path) -> None:
    folder = write_universal(tmp_path / "theirs", {"a": some(4, 3), "b": some(5)}, bare)
    if bare:
        with pytest.raises(CheckpointError, match="its shape is in no model_states file"):
            tensors_of(folder)
        return
    torch.save({"param": some(3, 4)}, folder / TAG / "zero" / "a" / "exp_avg.pt")
    with pytest.raises(CheckpointError, match=r"its shape is \[3, 4\], and that of the weight \[4, 3\]"):
        tensors_of(folder)
    shutil.rmtree(folder / TAG / "zero" / "a")
    (folder / TAG / "zero" / "a").mkdir()
    with pytest.raises(CheckpointError, match=r"a/fp32.pt cannot be read"):
        tensors_of(folder)
