"""Shoal computes what transformers computes, and each opens the other's folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.model.decoder import Decoder
from shoal.model.hf import INDEX, load_shape, load_weights, save_folder
from shoal.spec.hf.folder import notes_of
from tests.model.families import CONFIGS, logits, opened, random_model

TOKENS = torch.randint(0, 151, (2, 40), generator=torch.Generator().manual_seed(7))
TOLERANCE = 1e-5  # absolute, on logits of standard deviation about 1.4


def imported(folder: Path) -> Decoder:
    with torch.device("meta"):
        model = Decoder(load_shape(folder))
    model.to_empty(device="cpu")
    load_weights(model, folder)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_both_ways(name: str, tmp_path: Path) -> None:
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = logits(theirs, TOKENS)
    assert expected.std() > 0.1  # a model that says nothing would equal anything

    ours = imported(tmp_path / "theirs")
    with torch.no_grad():
        found = ours(TOKENS)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)

    save_folder(tmp_path / "ours", ours.shape, ours.state_dict())
    again = opened(tmp_path / "ours")
    assert torch.equal(logits(again, TOKENS), expected)  # the same weights under the same code: to the bit
    assert _said(again.config) == _said(theirs.config)
    kept, written = (load_file(tmp_path / who / "model.safetensors") for who in ("theirs", "ours"))
    assert kept.keys() == written.keys()
    assert all(torch.equal(kept[name], written[name]) for name in kept)


def _said(config: object) -> dict[str, object]:
    said = json.loads(config.to_json_string(use_diff=False))  # type: ignore[attr-defined]
    for key in ("_name_or_path", "transformers_version", "architectures", "dtype"):
        said.pop(key, None)
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):  # what `layer_types` says, for older ones
        said.pop(key, None)
    if said.get("head_dim") is None:  # Mixtral: what it then takes is what Shoal says outright
        said["head_dim"] = said["hidden_size"] // said["num_attention_heads"]
    rope = said["rope_parameters"]
    if rope.get("rope_type") == "yarn":  # what transformers infers when it is left out, Shoal may say outright
        for key in ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
            rope.pop(key, None)
    return said


@pytest.mark.parametrize("name", ["gemma3", "deepseek-v3"])
def test_packed_documents_are_what_transformers_says_of_each_alone(name: str, tmp_path: Path) -> None:
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path)
    ours = imported(tmp_path)
    lengths = [1, 5, 14, 9]  # shorter than Gemma's window, and longer
    tokens = [torch.randint(0, 151, (1, n), generator=torch.Generator().manual_seed(n)) for n in lengths]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    alone = torch.cat([logits(theirs, one) for one in tokens], 1)
    with torch.no_grad():
        packed = ours(torch.cat(tokens, 1), positions, documents)
        leaking = ours(torch.cat(tokens, 1), positions)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)
    assert (leaking - alone).abs().max() > 1e-2  # the test would see it


@pytest.mark.parametrize("style", ["transformers 4", "transformers 5"])
def test_both_spellings_of_rope_are_read(style: str, tmp_path: Path) -> None:
    theirs = random_model("llama3")
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    if style == "transformers 4":
        config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    else:
        config["rope_parameters"] = rope
    file.write_text(json.dumps(config))
    with torch.no_grad():
        found = imported(tmp_path)(TOKENS)
    torch.testing.assert_close(found, logits(theirs, TOKENS), rtol=0, atol=TOLERANCE)


def test_weights_in_several_files_are_read_and_written(tmp_path: Path) -> None:
    theirs = random_model("qwen2-sliding")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    ours = imported(tmp_path / "theirs")
    save_folder(tmp_path / "ours", ours.shape, dict(ours.named_parameters()), shard_bytes=50_000)
    files = sorted(p.name for p in (tmp_path / "ours").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    assert all((tmp_path / "ours" / f).stat().st_size < 60_000 for f in files)
    expected = logits(theirs, TOKENS)
    assert torch.equal(logits(opened(tmp_path / "ours"), TOKENS), expected)
    with torch.no_grad():
        torch.testing.assert_close(imported(tmp_path / "ours")(TOKENS), expected, rtol=0, atol=TOLERANCE)


def _in_two_files(folder: Path, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], index: str) -> None:
    where = {}
    for file, tensors in (("a.safetensors", first), ("b.safetensors", second)):
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("chosen", [None, "other.safetensors", "other.safetensors.index.json"])
def test_of_several_layouts_in_a_folder_the_one_is_read_that_transformers_reads(
    chosen: str | None, tmp_path: Path
) -> None:
    """Three sets of weights in one folder, one of them true: the single file, unless config.json names another."""
    theirs = random_model("llama2")
    theirs.save_pretrained(tmp_path)
    true = load_file(tmp_path / "model.safetensors")
    wrong = {name: tensor + 1 for name, tensor in true.items()}
    half = sorted(true)[: len(true) // 2]
    _in_two_files(tmp_path, {n: wrong[n] for n in half}, {n: t for n, t in wrong.items() if n not in half}, INDEX)
    if chosen is not None:
        save_file(wrong, tmp_path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": chosen}))
    if chosen == "other.safetensors":
        save_file(true, tmp_path / chosen, metadata={"format": "pt"})
    elif chosen is not None:
        _in_two_files(tmp_path, {n: true[n] for n in half}, {n: t for n, t in true.items() if n not in half}, chosen)
    expected = logits(opened(tmp_path), TOKENS)
    torch.testing.assert_close(expected, logits(theirs, TOKENS), rtol=0, atol=TOLERANCE)  # and not the wrong ones
    with torch.no_grad():
        torch.testing.assert_close(imported(tmp_path)(TOKENS), expected, rtol=0, atol=TOLERANCE)


def test_an_export_in_bfloat16_is_half_the_size_and_says_so(tmp_path: Path) -> None:
    shape = _tiny_shape(tmp_path)
    model = Decoder(shape)
    model.init_weights(0)
    save_folder(tmp_path / "whole", shape, dict(model.named_parameters()))
    save_folder(tmp_path / "half", shape, dict(model.named_parameters()), dtype=torch.bfloat16)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "half")]
    assert sizes[1] < 0.55 * sizes[0]
    assert opened(tmp_path / "half").dtype == torch.bfloat16


def _tiny_shape(tmp_path: Path):  # type: ignore[no-untyped-def]
    CONFIGS["llama2"]().save_pretrained(tmp_path / "config")
    return load_shape(tmp_path / "config")


def test_the_row_of_the_padding_token_is_trained_here_and_not_in_transformers(tmp_path: Path) -> None:
    """All other gradients are the same. Where a folder names such a token, training says so."""
    theirs = random_model("llama2")
    theirs.model.embed_tokens.padding_idx = pad = int(TOKENS[0, 3])
    theirs.config.pad_token_id = pad
    theirs.save_pretrained(tmp_path)
    targets = TOKENS.roll(-1, 1)
    logits_of = theirs(input_ids=TOKENS, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits_of.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    ours = imported(tmp_path)
    ours(TOKENS, targets=targets).backward()
    expected, found = theirs.model.embed_tokens.weight.grad, ours.embed.weight.grad
    assert expected is not None
    assert found is not None
    assert not expected[pad].any()
    assert found[pad].any()
    others = torch.arange(151) != pad
    torch.testing.assert_close(found[others], expected[others], rtol=1e-4, atol=1e-4)
    (note,) = notes_of(tmp_path)
    assert f"pad_token_id {pad}, whose embedding transformers does not train" in note
