"""A folder that does not hold the model it says it holds is refused in one sentence, before anything is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.errors import DataError, SetupError, ShoalError, UsageError
from shoal.model.decoder import Decoder
from shoal.model.hf import INDEX, load_shape, load_weights, save_folder
from shoal.spec.model import Model
from shoal.spec.shape import shape_of

SHAPE = shape_of(Model(vocab_size=64, dim=16, layers=1, heads=2, ffn_dim=24, tie_embeddings=True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_folder(tmp_path / "hf", SHAPE, dict(made(0).named_parameters()))
    return tmp_path / "hf"


def made(seed: int) -> Decoder:
    model = Decoder(SHAPE)
    model.init_weights(seed)
    return model


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def lose(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("model.norm.weight"))


def add(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(2)}))


def reshape(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(15)}))


def untie(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"lm_head.weight": torch.zeros(64, 16)}))


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickle_instead(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def index_to_nowhere(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}))


def index_out_of_the_folder(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "../other/model.safetensors"}}))


def broken_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (lose, DataError, "lacks the tensor model.norm.weight"),
        (add, DataError, "has the tensor model.layers.1.mlp.up_proj.weight"),
        (reshape, DataError, "model.norm.weight is [15], but the model needs [16]"),
        (untie, DataError, "head is tied"),
        (truncate, DataError, "is damaged"),
        (pickle_instead, DataError, "pytorch_model.bin, a pickle"),
        (nothing, SetupError, "has neither model.safetensors nor"),
        (index_to_nowhere, DataError, "model-00001-of-00002.safetensors, which is not there"),
        (index_out_of_the_folder, DataError, "lies outside its folder"),
        (broken_index, DataError, "cannot be read as an index"),
    ],
)
def test_wrong_weights_are_refused_and_nothing_is_loaded(
    damage: Callable[[Path], None], error: type[ShoalError], said: str, folder: Path
) -> None:
    damage(folder)
    model, before = made(1), made(1)
    with pytest.raises(error) as refusal:
        load_weights(model, folder)
    assert said in str(refusal.value)
    assert str(folder) in str(refusal.value)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


def test_a_tied_head_that_was_written_all_the_same_and_old_rope_buffers_do_no_harm(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    rewrite(folder, change)
    model = made(1)
    load_weights(model, folder)
    assert torch.equal(model.embed.weight, made(0).embed.weight)


def test_a_missing_or_broken_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read as JSON"):
        load_shape(folder)
    (folder / "config.json").unlink()
    with pytest.raises(SetupError, match="is not there"):
        load_shape(folder)


def test_an_export_never_mixes_with_what_is_there(folder: Path) -> None:
    before = sorted(folder.iterdir())
    with pytest.raises(UsageError, match="not empty"):
        save_folder(folder, SHAPE, dict(made(0).named_parameters()))
    assert sorted(folder.iterdir()) == before


def test_a_failed_export_leaves_nothing_behind(tmp_path: Path) -> None:
    tensors = dict(made(0).named_parameters())
    del tensors["norm.weight"]
    with pytest.raises(DataError, match=r"norm\.weight is missing"):
        save_folder(tmp_path / "out", SHAPE, tensors)
    with pytest.raises(FileNotFoundError):
        save_folder(tmp_path / "out", SHAPE, dict(made(0).named_parameters()), like=tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []
