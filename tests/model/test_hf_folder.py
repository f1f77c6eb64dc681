"""A folder that does not hold the model it says it holds is refused in one sentence, before anything is changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.errors import DataError, SetupError, ShoalError, SpecError, UsageError
from shoal.model.decoder import Decoder
from shoal.model.hf import INDEX, load_shape, load_weights, save_folder
from shoal.spec.hf.folder import notes_of
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


def named(folder: Path, where: object) -> None:
    """An index instead of the single file, whose tensors are in part.safetensors."""
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / INDEX).write_text(where if isinstance(where, str) else json.dumps({"weight_map": where}))


def index_to_nowhere(folder: Path) -> None:
    named(folder, {"model.norm.weight": "model-00001-of-00002.safetensors"})


def index_out_of_the_folder(folder: Path) -> None:
    named(folder, {"model.norm.weight": "../other/model.safetensors"})


def index_to_the_folder_above(folder: Path) -> None:
    named(folder, {"model.norm.weight": ".."})


def index_with_a_nul(folder: Path) -> None:
    named(folder, {"model.norm.weight": "part\0.safetensors"})


def index_with_half_a_letter(folder: Path) -> None:
    named(folder, '{"weight_map": {"model.norm.weight": "part\\ud800.safetensors"}}')


def index_of_numbers(folder: Path) -> None:
    named(folder, {"model.norm.weight": 7})


def index_of_nothing(folder: Path) -> None:
    named(folder, {})


def deep_index(folder: Path) -> None:
    named(folder, "[" * 100_000)


def broken_index(folder: Path) -> None:
    named(folder, "{")


def tensor_of_another_file(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({"model.norm.weight": tensors.pop("model.norm.weight")}, folder / "b.safetensors")
    save_file(tensors, folder / "a.safetensors")
    (folder / "model.safetensors").unlink()
    where = dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "a.safetensors"}
    where["model.embed_tokens.weight"] = "b.safetensors"
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def tensor_in_two_files(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"] + 1}, folder / "b.safetensors")
    named(folder, dict.fromkeys(tensors, "part.safetensors") | {"model.norm.weight": "b.safetensors"})


def integers(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({n: (x * 100).to(torch.int8) for n, x in t.items()}))


def truths(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"] > 0}))


def eight_bits(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({n: x.to(torch.float8_e4m3fn) for n, x in t.items() if x.ndim == 2}))


def tied_in_another_dtype(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].bfloat16()}))


def fifo(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def fifo_as_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / INDEX)


def fifo_in_the_index(folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    named(folder, dict.fromkeys(names, "part.safetensors"))
    (folder / "part.safetensors").unlink()
    os.mkfifo(folder / "part.safetensors")


def device(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")


def directory(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def shards_of_a_distributed_save(folder: Path) -> None:
    save_file({"x": torch.zeros(1)}, folder / "shard-00000-model-00001-of-00001.safetensors")


def names_the_folder_above(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "../hf/model.safetensors"}))


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
        (index_to_the_folder_above, DataError, "lies outside its folder"),
        (index_with_a_nul, DataError, "lies outside its folder"),
        (index_with_half_a_letter, DataError, "half a character"),
        (index_of_numbers, DataError, "cannot be read as an index"),
        (index_of_nothing, DataError, "cannot be read as an index"),
        (deep_index, DataError, "cannot be read as an index"),
        (broken_index, DataError, "cannot be read as an index"),
        (tensor_of_another_file, DataError, "for the tensor model.embed_tokens.weight, which is not in it"),
        (tensor_in_two_files, DataError, "has the tensor model.norm.weight in b.safetensors and in part.safetensors"),
        (integers, DataError, "has the dtype I8"),
        (truths, DataError, "model.norm.weight has the dtype BOOL"),
        (eight_bits, DataError, "has the dtype F8_E4M3"),
        (tied_in_another_dtype, DataError, "head is tied"),
        (fifo, DataError, "is a FIFO"),
        (fifo_as_index, DataError, "is a FIFO"),
        (fifo_in_the_index, DataError, "is a FIFO"),
        (device, DataError, "is a device"),
        (directory, DataError, "is a folder, where a file should be"),
        (shards_of_a_distributed_save, DataError, "a part of a distributed save"),
        (names_the_folder_above, DataError, "transformers_weights ../hf/model.safetensors"),
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_no_number_is_refused_by_name(bad: float, dtype: torch.dtype, folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
        tensors["model.norm.weight"][7] = bad

    rewrite(folder, change)
    with pytest.raises(DataError, match=r"model\.norm\.weight holds NaN or infinity"):
        load_weights(made(1), folder)


def test_large_weights_whose_sum_is_no_number_are_weights_all_the_same(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.full((16,), 3e38)}))
    model = made(1)
    load_weights(model, folder)
    assert model.norm.weight.detach().tolist() == [torch.tensor(3e38).item()] * 16


def test_links_are_followed_as_in_the_cache_of_the_hub(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "model.safetensors").symlink_to(folder.parent / "blob")
    model = made(1)
    load_weights(model, folder)
    assert torch.equal(model.embed.weight, made(0).embed.weight)


def changed(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"num_hidden_layers": 1 << 62}, SpecError, "num_hidden_layers"),
        ({"num_hidden_layers": 10_000}, DataError, "parameters, but the weights beside it have"),
        ({"vocab_size": 1 << 30}, DataError, "parameters, but the weights beside it have"),
        ({"hidden_size": 16.0}, SpecError, "hidden_size"),
        ({"hidden_size": True}, SpecError, "hidden_size"),
        ({"num_key_value_heads": 3}, SpecError, "does not divide"),
        ({"head_dim": 7}, SpecError, "is odd"),
        ({"rms_norm_eps": 0}, SpecError, "model.norm_eps"),
        ({"attention_dropout": 7}, SpecError, "attention_dropout"),
        ({"is_causal": False}, SpecError, "is_causal False: Shoal's attention is causal"),
        ({"no_such_field": [1]}, SpecError, "no_such_field [1], a field that Shoal does not know"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_other.Other"}}, SpecError, "auto_map"),
    ],
)
def test_what_a_config_makes_of_its_weights_is_asked_before_anything_is_built(
    fields: dict[str, object], error: type[ShoalError], said: str, folder: Path
) -> None:
    changed(folder, **fields)
    with pytest.raises(error) as refusal:
        load_shape(folder)
    assert said in str(refusal.value)


def test_an_adapter_is_not_taken_for_the_model(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(DataError, match="merge the two first"):
        load_shape(folder)


def test_what_shoal_leaves_out_in_training_is_said(folder: Path) -> None:
    assert notes_of(folder) == []
    changed(folder, attention_dropout=0.1, pad_token_id=2)
    dropout, pad = notes_of(folder)
    assert "attention_dropout 0.1, and Shoal trains without dropout" in dropout
    assert "pad_token_id 2, whose embedding transformers does not train" in pad


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
