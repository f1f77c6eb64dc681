"""Experts in Hugging Face folders: the names of published ones, what a class cannot hold, who reads what."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shoal.errors import DataError, SpecError, UsageError
from shoal.model import hf, init
from shoal.model.decoder import Decoder
from shoal.model.hf import load_shape, load_weights, save_folder
from shoal.model.loads import biases
from shoal.spec.hf.config import from_hf, to_hf
from shoal.spec.model import Experts, Model, RopeScaling
from shoal.spec.shape import Shape, shape_of
from tests.model.families import logits, opened, random_model
from tests.model.test_transformers import TOKENS, TOLERANCE, imported
from tests.ranks import run_ranks

SMALL: dict[str, Any] = {"vocab_size": 64, "dim": 16, "layers": 2, "heads": 2}
EXPERTS: dict[str, Any] = {"count": 4, "top_k": 2, "ffn_dim": 12}


def shape(family: str = "mixtral", **experts: Any) -> Shape:
    if family == "dots1":
        experts = {"score": "sigmoid", "shared": 1} | experts
    spec = Experts(**EXPERTS | experts)
    # As large as it takes for another choice of experts to be seen in the logits.
    return shape_of(Model(family=family, qk_norm=family != "mixtral", experts=spec, init_std=0.3, **SMALL))


def made(of: Shape, seed: int = 0) -> Decoder:
    model = Decoder(of)
    model.init_weights(seed)
    return model


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-dense-first", "dots1"])
def test_a_folder_with_stacked_experts_is_read_too(name: str, tmp_path: Path) -> None:
    """The form that transformers 5 holds in memory, and writes when it is told not to split it."""
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path, save_original_format=False)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    assert not any(".experts.0." in name for name in names)
    with torch.no_grad():
        found = imported(tmp_path)(TOKENS)
    torch.testing.assert_close(found, logits(theirs, TOKENS), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "some"),
    [
        (
            "mixtral",
            {
                "model.layers.0.block_sparse_moe.gate.weight": [4, 16],
                "model.layers.0.block_sparse_moe.experts.3.w1.weight": [12, 16],
                "model.layers.1.block_sparse_moe.experts.0.w2.weight": [16, 12],
                "model.layers.1.block_sparse_moe.experts.1.w3.weight": [12, 16],
            },
        ),
        (
            "qwen3_moe",
            {
                "model.layers.0.mlp.gate.weight": [4, 16],
                "model.layers.0.mlp.experts.3.gate_proj.weight": [12, 16],
                "model.layers.1.mlp.experts.0.down_proj.weight": [16, 12],
                "model.layers.1.mlp.experts.1.up_proj.weight": [12, 16],
            },
        ),
        (
            "dots1",
            {
                "model.layers.0.mlp.gate.e_score_correction_bias": [4],
                "model.layers.0.mlp.shared_experts.up_proj.weight": [12, 16],
            },
        ),
    ],
)
def test_tensors_are_written_under_the_published_names(family: str, some: dict[str, list[int]], tmp_path: Path) -> None:
    model = made(shape(family))
    save_folder(tmp_path / "out", model.shape, model.state_dict(), dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: list(tensors[name].shape) for name in some} == some
    per_expert = sum(".experts." in name for name in tensors)
    assert per_expert == 2 * 4 * 3
    bias = tensors.get("model.layers.0.mlp.gate.e_score_correction_bias")
    assert bias is None or bias.dtype == torch.float32  # the biases differ by less than bfloat16 can tell
    assert opened(tmp_path / "out").num_parameters() == model.shape.params  # and transformers counts what we count


def test_several_files_cut_between_experts(tmp_path: Path) -> None:
    model = made(shape())
    save_folder(tmp_path / "out", model.shape, model.state_dict(), shard_bytes=3000)
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 5
    assert max(f.stat().st_size for f in files) < 8000  # a stack of four is 3072 alone, an embedding 4096
    again = Decoder(model.shape)
    load_weights(again, tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_biases_that_the_class_cannot_hold_are_refused_unless_they_are_to_be_dropped(tmp_path: Path) -> None:
    model = made(shape("mixtral"))
    save_folder(tmp_path / "even", model.shape, model.state_dict())  # nothing is lost
    with pytest.raises(UsageError, match=r"nothing to leave out: .* this mixtral model has none"):
        save_folder(tmp_path / "out", model.shape, model.state_dict(), drop_biases=True)
    model.blocks["1"].ffn.bias.copy_(torch.tensor([0.25, 0.0, -0.125, 0.0]))
    with pytest.raises(UsageError, match=r"MixtralForCausalLM has no place for the biases .*0\.375, in blocks\.1"):
        save_folder(tmp_path / "out", model.shape, model.state_dict())
    assert not (tmp_path / "out").exists()
    save_folder(tmp_path / "out", model.shape, model.state_dict(), drop_biases=True)
    opened(tmp_path / "out")
    again = Decoder(model.shape)
    again.blocks["0"].ffn.bias.fill_(7.0)
    load_weights(again, tmp_path / "out")
    assert not biases([again]).any()  # and not what lay in memory


def test_a_class_with_a_place_for_biases_keeps_them_to_the_bit(tmp_path: Path) -> None:
    model = made(shape("dots1", normalize=True))
    for block in model.blocks.values():
        block.ffn.bias.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.3)
    with pytest.raises(UsageError, match="this dots1 model keeps them"):
        save_folder(tmp_path / "out", model.shape, model.state_dict(), drop_biases=True)
    save_folder(tmp_path / "out", model.shape, model.state_dict())
    tokens = TOKENS % 64
    with torch.no_grad():
        mine = model(tokens)
    theirs = logits(opened(tmp_path / "out"), tokens)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE)
    again = Decoder(model.shape)
    load_weights(again, tmp_path / "out")
    assert torch.equal(biases([again]), biases([model]))
    for block in again.blocks.values():
        block.ffn.bias.zero_()
    with torch.no_grad():
        assert (again(tokens) - mine).abs().max() > 100 * TOLERANCE  # they did pick other experts


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    model = made(shape("qwen3_moe"))
    save_folder(tmp_path / "out", model.shape, model.state_dict())
    more = Decoder(replace(model.shape, experts=Experts(**EXPERTS | {"count": 5})))
    with pytest.raises(DataError, match=r"lacks the tensor model\.layers\.0\.mlp\.experts\.4\.gate_proj\.weight"):
        load_weights(more, tmp_path / "out")


def test_a_stretch_of_the_model_takes_its_own_part_of_a_folder(tmp_path: Path) -> None:
    model = made(shape("qwen3_moe"))
    save_folder(tmp_path / "out", model.shape, model.state_dict())
    stages = [Decoder(model.shape, range(1)), Decoder(model.shape, range(1, 2))]
    load_weights(stages, tmp_path / "out")
    loaded = {name: p for stage in stages for name, p in stage.named_parameters()}
    assert set(loaded) == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(loaded[name], p) for name, p in model.named_parameters())


LAYOUTS = {"experts": [Shard(0)], "rows": [Shard(1)], "columns": [Shard(2)]}
TWICE = {"experts, then rows": [Shard(1), Shard(0)], "held twice": [Replicate(), Shard(0)]}


def test_stacks_cut_along_any_dimension_are_filled_as_on_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "BLOCK_NUMBERS", 50)  # several generators a matrix, whose borders are not the shards'
    reference, other = made(shape(), seed=5), made(shape(), seed=6)
    save_folder(tmp_path / "hf", other.shape, other.state_dict())

    def work(rank: int, world: int) -> dict[str, bool]:
        flat, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, 2))
        same = {}
        for layout, placements in (LAYOUTS | TWICE).items():
            model = Decoder(shape())
            for block in model.blocks.values():
                experts = block.ffn.experts
                for name, stack in list(experts.named_parameters()):
                    mesh = square if len(placements) == 2 else flat
                    setattr(experts, name, torch.nn.Parameter(distribute_tensor(stack, mesh, placements)))
            for seed, source in ((5, reference), (6, other)):
                if seed == 5:
                    model.init_weights(seed)
                else:
                    load_weights(model, tmp_path / "hf")
                whole = {n: p.full_tensor() if "experts" in n else p for n, p in model.named_parameters()}
                same[f"{layout}, {seed}"] = all(torch.equal(whole[n], p) for n, p in source.named_parameters())
        return same

    for found in run_ranks(work, 4):
        assert found == dict.fromkeys(found, True)
        assert len(found) == 10


def test_a_process_reads_only_the_experts_that_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(shape())
    save_folder(tmp_path / "hf", model.shape, model.state_dict())
    read: list[str] = []
    plain = hf._rows

    def noted(file: Any, name: str, *rest: Any, **more: Any) -> torch.Tensor:
        read.append(name)
        return plain(file, name, *rest, **more)

    monkeypatch.setattr(hf, "_rows", noted)

    def work(rank: int, world: int) -> list[str]:
        mesh = init_device_mesh("cpu", (world,))
        part = Decoder(shape())
        for block in part.blocks.values():
            for name, stack in list(block.ffn.experts.named_parameters()):
                setattr(block.ffn.experts, name, torch.nn.Parameter(distribute_tensor(stack, mesh, [Shard(0)])))
        load_weights(part, tmp_path / "hf")
        return sorted({name.split(".experts.")[1][0] for name in read if ".experts." in name})

    assert run_ranks(work, 2) == [["0", "1"], ["2", "3"]]


CONFIG = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("kind", "said", "experts"),
    [
        ("mixtral", {}, {"count": 8, "top_k": 2, "ffn_dim": 96, "normalize": True}),
        ("qwen3_moe", {}, {"count": 128, "top_k": 8, "ffn_dim": 768, "normalize": False}),
        ("qwen3_moe", {"mlp_only_layers": None, "norm_topk_prob": True}, {"dense_layers": 0, "normalize": True}),
        ("qwen3_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [0, 1]}, {"dense_layers": 2}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "num_hidden_layers": 2}, {"dense_layers": 1}),
        ("qwen3_moe", {"num_local_experts": 16}, {"count": 16}),
        ("qwen3_moe", {"num_experts": 12}, {"count": 12}),
        (
            "dots1",
            {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 1},
            {"count": 8, "ffn_dim": 1408, "shared": 2, "dense_layers": 1, "score": "sigmoid"},
        ),
    ],
)
def test_what_a_config_says_of_its_experts(kind: str, said: dict[str, Any], experts: dict[str, Any]) -> None:
    fields = from_hf({"model_type": kind, **CONFIG, **said})
    assert experts.items() <= fields["experts"].items()
    own = [fields["experts"][name] for name in ("balance_rate", "balance_loss", "z_loss")]
    assert own == [0.0, 0.0, 0.0]  # it is trained as it came
    shape = shape_of(Model(**fields))
    assert shape_of(Model(**from_hf(to_hf(shape)))) == shape


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [3]}, r"mlp_only_layers \[3\]"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0, 1, 2, 3]}, "or all"),
        ({"model_type": "mixtral", "num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"model_type": "dots1"}, "n_routed_experts"),
        ({"model_type": "dots1", "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2}, "n_group"),
        (
            {"model_type": "dots1", "n_routed_experts": 8, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5},
            "routed_scaling_factor",
        ),
    ],
)
def test_experts_that_shoal_cannot_compute_are_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        from_hf({**CONFIG, **wrong})


@pytest.mark.parametrize(
    ("family", "experts", "said"),
    [
        ("llama", {}, r"family llama has no model\.experts \(mixtral, qwen3_moe, dots1 and deepseek_v3 do\)"),
        ("mixtral", None, r"family mixtral needs model\.experts"),
        ("mixtral", {"shared": 1}, r"no model\.experts\.shared \(dots1 and deepseek_v3 do\)"),
        ("mixtral", {"dense_layers": 1}, r"no model\.experts\.dense_layers"),
        ("mixtral", {"normalize": False}, "normalize true"),
        ("mixtral", {"score": "sigmoid"}, "score softmax"),
        ("qwen3_moe", {"shared": 2}, r"no model\.experts\.shared"),
        ("qwen3_moe", {"score": "sigmoid"}, "score softmax"),
        ("dots1", {"shared": 1}, "score sigmoid"),
        ("dots1", {"score": "sigmoid"}, "shared of at least 1"),
    ],
)
def test_experts_without_a_transformers_class_are_refused(
    family: str, experts: dict[str, Any] | None, said: str
) -> None:
    spec = None if experts is None else Experts(**EXPERTS | experts)
    of = shape_of(Model(family=family, qk_norm=family in ("qwen3_moe", "dots1"), experts=spec, **SMALL))
    with pytest.raises(SpecError, match=said) as refusal:
        to_hf(of)
    assert str(refusal.value).endswith(".")


def test_a_config_of_ours_says_what_it_must(tmp_path: Path) -> None:
    model = made(shape("qwen3_moe", dense_layers=1))
    save_folder(tmp_path / "out", model.shape, model.state_dict())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_experts"], config["mlp_only_layers"], config["norm_topk_prob"]) == (4, [0], True)
    assert load_shape(tmp_path / "out").experts == Experts(
        **EXPERTS | {"dense_layers": 1, "balance_rate": 0.0, "balance_loss": 0.0, "z_loss": 0.0}
    )


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_a_stretched_mixtral_of_the_usual_heads_is_opened_by_transformers(kind: str, tmp_path: Path) -> None:
    """Its class declares a head_dim of null, with which those two kinds of RoPE fail."""
    scaled = replace(
        shape("mixtral"), rope_scaling=RopeScaling.model_validate({"kind": kind, "factor": 2.0}), max_seq_len=16
    )
    assert scaled.head_dim * scaled.heads == scaled.dim
    model = made(scaled)
    save_folder(tmp_path / "out", model.shape, model.state_dict())
    with torch.no_grad():
        mine = model(TOKENS % 64)
    torch.testing.assert_close(logits(opened(tmp_path / "out"), TOKENS % 64), mine, rtol=0, atol=1e-5)
