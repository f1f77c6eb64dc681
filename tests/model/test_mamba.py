"""A hybrid of state-space layers and attention: its scan, its documents, its facts beside its module, its refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shoal.decide.checks import trainable
from shoal.errors import SpecError
from shoal.model.decoder import Block, Decoder
from shoal.model.hf import save_folder
from shoal.model.mamba import convolve, scan
from shoal.parallel.build import build
from shoal.parallel.place import lay_out
from shoal.spec import Run
from shoal.spec.flops import seen_pairs
from shoal.spec.mesh import Sizes
from shoal.spec.mixers import KINDS, mamba
from shoal.spec.model import Model
from shoal.spec.shape import Shape, shape_of
from shoal.spec.stages import layer_costs
from shoal.train.muon import Muon
from shoal.train.optim import Optimizers
from tests.plan.runs import closed
from tests.ranks import run_ranks

HYBRID: dict[str, Any] = {
    "family": "bamba",
    "vocab_size": 40,
    "dim": 32,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 48,
    "mamba": {"attention_layers": [1], "heads": 4, "state_dim": 8, "groups": 2, "proj_bias": True},
}
ONE_GROUP: dict[str, Any] = {**HYBRID, "mamba": {"attention_layers": [1], "heads": 4, "state_dim": 8}}


def shape(**changes: Any) -> Shape:
    return shape_of(Model(**{**HYBRID, **changes}))


def one_by_one(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, documents: Tensor | None) -> Tensor:
    """The recurrence as the paper writes it."""
    each = x.shape[2] // b.shape[2]
    b, c = (t.repeat_interleave(each, 2) for t in (b, c))
    state = torch.zeros(x.shape[0], *x.shape[2:], b.shape[-1], dtype=x.dtype)
    found = []
    for t in range(x.shape[1]):
        if documents is not None and t:
            state = state * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        state = state * (dt[:, t] * a).exp()[:, :, None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        found.append((state * c[:, t, :, None]).sum(-1))
    return torch.stack(found, 1)


@pytest.mark.parametrize("seq", [1, 7, 8, 30, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_the_scan_is_the_recurrence_whatever_the_chunk(seq: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seq)
    x, dt = torch.randn(2, seq, 4, 3, dtype=torch.float64), torch.rand(2, seq, 4, dtype=torch.float64)
    b, c = (torch.randn(2, seq, 2, 5, dtype=torch.float64) for _ in range(2))
    a = -3 * torch.rand(4, dtype=torch.float64)
    documents = (torch.rand(2, seq) < 0.15).cumsum(1) if packed else None
    expected = one_by_one(x, dt, a, b, c, documents)
    for chunk in (4, 8, 128):
        monkeypatch.setattr(mamba, "CHUNK", chunk)
        torch.testing.assert_close(scan(x, dt, a, b, c, documents), expected, rtol=0, atol=1e-12)


def test_a_decay_that_forgets_at_once_gives_no_nan() -> None:
    x, dt = torch.ones(1, 200, 1, 2, requires_grad=True), torch.full((1, 200, 1), 50.0)
    y = scan(x, dt, torch.tensor([-16.0]), torch.ones(1, 200, 1, 3), torch.ones(1, 200, 1, 3), None)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_the_convolution_is_torchs_own() -> None:
    x, weight, bias = torch.randn(2, 9, 6), torch.randn(6, 4), torch.randn(6)
    expected = nn.functional.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=3, groups=6)[..., :9]
    torch.testing.assert_close(convolve(x, weight, bias, None), expected.transpose(1, 2))


@pytest.mark.parametrize("chunk", [4, 128])
def test_packed_documents_are_what_each_is_alone(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba, "CHUNK", chunk)
    model = Decoder(shape())
    model.init_weights(1)
    lengths = [1, 5, 2, 9, 3]
    tokens = [torch.randint(0, 40, (1, n), generator=torch.Generator().manual_seed(n)) for n in lengths]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        packed = model(torch.cat(tokens, 1), positions, documents)
        alone = torch.cat([model(one) for one in tokens], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=2e-6)
    with torch.no_grad():
        leaking = model(torch.cat(tokens, 1), positions)
    assert (leaking - alone).abs().max() > 1e-3  # the test would see it


@pytest.mark.parametrize("made", [HYBRID, ONE_GROUP, {**HYBRID, "qkv_bias": True, "out_bias": True}])
def test_the_facts_of_a_mixer_are_those_of_its_module(made: dict[str, Any]) -> None:
    of = shape_of(Model(**made))
    model = Decoder(of)
    for layer, block in enumerate(model.blocks.values()):
        assert isinstance(block, Block)
        listed = {weight.name: weight.dims for weight in of.mixer_weights(layer)}
        assert listed == {name: tuple(p.shape) for name, p in block.mixer.named_parameters()}
    assert of.params == sum(p.numel() for p in model.parameters())
    assert of.mixers == ("mamba", "attention")


def test_tensor_parallelism_cuts_what_the_facts_say() -> None:
    runs = [closed(made, **{"mesh.tp": 2, "data.seq_len": 16}) for made in (HYBRID, ONE_GROUP)]

    def rank(rank: int, world: int) -> None:
        for run in runs:
            laid = build(run, lay_out(rank, world, torch.device("cpu"), Sizes.of(run.mesh)))
            for layer, block in enumerate(laid.decoders[0].blocks.values()):
                assert isinstance(block, Block)
                for weight in laid.shape.mixer_weights(layer):
                    held = block.mixer.get_parameter(weight.name)
                    assert isinstance(held, DTensor)
                    cut = [p.dim for p in held.placements if isinstance(p, Shard)]
                    assert cut == ([] if weight.cut is None else [weight.cut]), weight
                    assert held.to_local().shape == weight.local(world), weight

    run_ranks(rank, 2)


def test_layers_without_attention_see_no_pairs_and_have_costs_of_their_own() -> None:
    hybrid, dense = shape(), shape_of(Model(**{**HYBRID, "family": "llama", "mamba": None}))
    lengths = torch.tensor([10]).numpy()
    assert seen_pairs(hybrid, lengths) == seen_pairs(dense, lengths) // 3
    costs = layer_costs(replace(hybrid, vocab_size=1), 1 << 20)
    assert costs[1] > 10 * costs[0]  # attention over a million tokens
    assert hybrid.mixing_flops_per_token == 2 * KINDS["mamba"].flops_per_token(hybrid) > 0


def run_of(**changes: Any) -> Run:
    spec: dict[str, Any] = {"name": "x", "model": HYBRID, "data": {"train": ["x"]}, "train": {"steps": 9, "batch": 4}}
    for name, value in changes.items():
        section, key = name.split("__")
        spec[section] = {**spec.get(section, {}), key: value}
    return Run.model_validate(spec)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mesh__cp": 2}, "mesh.cp 2 cuts sequences, and a layer of model.mamba needs each of them whole"),
        ({"mesh__tp": 4}, "model.mamba.groups 2 and model.kv_heads 2 cannot be split over mesh.tp 4"),
        ({"model__family": "llama"}, "family llama has no model.mamba (bamba does)"),
        ({"model__mamba": None}, "family bamba needs model.mamba"),
        ({"model__head_dim": 6}, "model.head_dim 6 is no multiple of 4, and family bamba rotates half of each head"),
        ({"model__mamba": {"attention_layers": [3], "heads": 4}}, "attention_layers names layer 3, and model.layers 3"),
        ({"model__mamba": {"attention_layers": [], "heads": 3}}, "heads 3 does not divide twice model.dim 32"),
        ({"model__mamba": {"attention_layers": [], "heads": 4, "groups": 3}}, "groups 3 does not divide"),
        ({"model__mamba": {"attention_layers": [], "heads": 3, "head_dim": 8}}, "to be a multiple of model.dim (32)"),
        ({"model__qk_norm": True}, "model.qk_norm true does not go with family bamba"),
        ({"model__sliding_window": 8}, "family bamba has no model.sliding_window"),
    ],
)
def test_what_is_not_built_is_refused_in_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refusal:
        trainable(run_of(**changes))
    assert said in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_eight_bits_and_stages_are_refused() -> None:
    from shoal.spec.eight_bits import check

    with pytest.raises(SpecError, match=r"fp8 does not compute the layers of model\.mamba yet: take bf16"):
        check(shape(), tensor_parallel=False)
    with pytest.raises(SpecError, match=r"model\.mamba has no effect in a model cut over peers"):
        trainable(run_of(), "stages")


def test_muon_leaves_convolutions_to_adamw() -> None:
    model = Decoder(shape())
    spec = run_of(train__optimizer={"name": "muon"}).train.optimizer
    optimizers = Optimizers(spec, model.named_parameters())
    by_muon = {id(p) for o in optimizers.parts if isinstance(o, Muon) for g in o.param_groups for p in g["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in by_muon}
    assert "blocks.0.mamba.x.weight" in names
    assert not any("_conv." in name or name.endswith(("a_log", "dt_bias")) for name in names)


def test_an_export_has_one_input_matrix_and_one_convolution(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = Decoder(shape())
    model.init_weights(3)
    save_folder(tmp_path / "hf", model.shape, model.state_dict())
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    state = model.state_dict()
    joined = torch.cat([state[f"blocks.0.mamba.{part}.weight"] for part in ("gate", "x", "b", "c", "dt")])
    assert torch.equal(theirs["model.layers.0.mamba.in_proj.weight"], joined)
    assert theirs["model.layers.0.mamba.conv1d.weight"].shape == (64 + 2 * 16, 1, 4)
    assert not any(".mamba.x" in name for name in theirs)
