"""A mixture of experts computes what its definition says, counts what it routed, and learns to spread the tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shoal.model.decoder import Decoder
from shoal.model.loads import apply_loads, balanced, biases, loads, squares
from shoal.model.moe import MixtureOfExperts, _grouped, _one_by_one, spread, swiglu
from shoal.spec.model import Experts, Model
from shoal.spec.shape import Shape, shape_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

EXPERTS: dict[str, Any] = {"count": 6, "top_k": 2, "ffn_dim": 20}
KINDS = {
    "mixtral": {},
    "one of six": {"top_k": 1},
    "all of six": {"top_k": 6},
    "as scored": {"normalize": False},
    "sigmoid and shared": {"score": "sigmoid", "shared": 2},
    "no z-loss": {"z_loss": 0.0},
}


def shape(layers: int = 3, **experts: Any) -> Shape:
    """One dense layer first unless told otherwise."""
    spec = Experts(**EXPERTS | {"dense_layers": 1} | experts)
    return shape_of(Model(vocab_size=61, dim=16, layers=layers, heads=2, ffn_dim=24, init_std=0.3, experts=spec))


def made(layers: int = 3, seed: int = 0, **experts: Any) -> Decoder:
    model = Decoder(shape(layers, **experts))
    model.init_weights(seed)
    return model


def mixture(model: Decoder, layer: int = 1) -> MixtureOfExperts:
    found = model.blocks[str(layer)].ffn
    assert isinstance(found, MixtureOfExperts)
    return found


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def tokens(batch: int = 2, seq: int = 24) -> Tensor:
    return torch.randint(0, 61, (batch, seq), generator=torch.Generator().manual_seed(3))


def by_hand(moe: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """One token after the other, one expert after the other; and the sum of the squared logsumexp."""
    rows, z = [], torch.zeros(())
    for token in x.flatten(0, 1):
        logits = moe.router.weight @ token
        z = z + (logits.logsumexp(0) - (0.0 if moe.spec.score == "softmax" else math.log(6))).square()
        scores = logits.softmax(0) if moe.spec.score == "softmax" else logits.sigmoid()
        favour = logits + 4 * moe.bias if moe.spec.score == "softmax" else scores + moe.bias
        chosen = favour.topk(moe.spec.top_k).indices
        weights = scores[chosen] / scores[chosen].sum() if moe.spec.normalize else scores[chosen]
        y = torch.zeros_like(token)
        for weight, e in zip(weights, chosen.tolist(), strict=True):
            gate, up, down = (stack[e] for stack in (moe.experts.gate, moe.experts.up, moe.experts.down))
            y = y + weight * (down @ (F.silu(gate @ token) * (up @ token)))
        if moe.shared is not None:
            y = y + moe.shared.down(F.silu(moe.shared.gate(token)) * moe.shared.up(token))
        rows.append(y)
    return torch.stack(rows).view_as(x), z


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_each_token_through_its_experts_one_by_one(kind: str) -> None:
    moe = mixture(made(**KINDS[kind]))
    moe.bias.copy_(random(6) * 0.1)
    x, slope = random(2, 9, 16), random(2, 9, 16, seed=1)
    parameters = dict(moe.named_parameters())

    a = x.clone().requires_grad_()
    expected, z = by_hand(moe, a)
    ((expected * slope).sum() + moe.spec.z_loss * z).backward()
    grads = {name: p.grad for name, p in parameters.items()} | {"x": a.grad}
    moe.zero_grad(set_to_none=True)

    b = x.clone().requires_grad_()
    found = moe(b)
    (found * slope).sum().backward()  # the z-loss is in the gradient though nobody adds it
    torch.testing.assert_close(found, expected)
    for name, grad in grads.items():
        torch.testing.assert_close(parameters[name].grad if name != "x" else b.grad, grad, msg=lambda m: f"{name}: {m}")  # noqa: B023
    assert moe.z.item() == pytest.approx(z.item(), rel=1e-5)


def test_the_z_loss_changes_the_gradient_by_its_own_and_the_loss_by_nothing() -> None:
    with_it, without = made(z_loss=0.01), made(z_loss=0.0)
    losses = [m(tokens(), targets=tokens()) for m in (with_it, without)]
    assert losses[0].item() == losses[1].item()
    for loss in losses:
        loss.backward()
    # Layer 2 is the last with a router, so nothing but its own z-loss comes back to its weight.
    seen: list[Tensor] = []
    moe = mixture(without, 2)
    moe.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    without(tokens())
    z = 0.01 * F.linear(seen[0].flatten(0, 1), moe.router.weight).logsumexp(-1).square().sum()
    (explicit,) = torch.autograd.grad(z, moe.router.weight)
    difference = mixture(with_it, 2).router.weight.grad - moe.router.weight.grad
    torch.testing.assert_close(difference, explicit, rtol=1e-4, atol=1e-5)
    assert explicit.abs().max() > 0.01


def test_a_bias_decides_who_is_picked_and_not_how_much_it_counts() -> None:
    moe = mixture(made(top_k=1, normalize=False))
    x = random(1, 30, 16)
    scores = moe.router(x[0]).softmax(-1)
    moe.bias[4] = 100.0
    y = moe(x)[0]
    assert moe.load.tolist() == [0, 0, 0, 0, 30, 0]
    alone = swiglu(x[0], torch.tensor([0, 0, 0, 0, 30, 0]), moe.experts.gate, moe.experts.up, moe.experts.down)
    torch.testing.assert_close(y, scores[:, 4:5] * alone)
    assert not moe.bias.requires_grad


def test_an_expert_without_tokens_has_a_gradient_of_zero_and_not_none() -> None:
    moe = mixture(made(top_k=1, z_loss=0.0))
    moe.bias[2] = 100.0
    moe(random(1, 8, 16)).sum().backward()
    for stack in (moe.experts.gate, moe.experts.up, moe.experts.down):
        assert stack.grad is not None
        assert stack.grad[2].any()
        assert not stack.grad[torch.arange(6) != 2].any()
    moe.zero_grad(set_to_none=True)
    moe.experts(torch.empty(0, 16), torch.zeros(6, dtype=torch.long)).sum().backward()  # what an idle process sees
    assert all(p.grad is not None and not p.grad.any() for p in moe.experts.parameters())


@pytest.mark.parametrize("counts", [[9, 3, 4], [1, 0, 15], [0, 16, 0]], ids=str)
def test_the_grouped_product_is_that_of_one_expert_after_the_other(counts: list[int]) -> None:
    """On the CPU, which has it for bfloat16; tests/gpu asks the kernels that are used."""
    found = []
    for compute in (_grouped, _one_by_one):
        sizes = ((16, 32), (3, 24, 32), (3, 24, 32), (3, 32, 24))
        parts = [random(*size, seed=i).bfloat16().requires_grad_() for i, size in enumerate(sizes)]
        y = compute(parts[0], torch.tensor(counts), *parts[1:])
        y.backward(random(16, 32, seed=9).bfloat16())
        found.append([y.detach(), *(part.grad for part in parts)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    for gradient in found[0][2:]:
        assert not gradient[torch.tensor(counts) == 0].any()


def test_rows_are_spread_and_their_gradients_gathered() -> None:
    x, order = random(5, 3).double().requires_grad_(), torch.randperm(10, generator=torch.Generator().manual_seed(0))
    assert torch.equal(spread(x, order, 2), x[order // 2])
    assert torch.autograd.gradcheck(lambda t: spread(t, order, 2), (x,))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_balancing_spreads_what_a_skewed_router_had_piled_up(score: str) -> None:
    model = made(layers=2, score=score, balance_rate=0.003)
    moe = mixture(model)
    x = random(4, 256, 16) + 1.5  # a common direction, which makes some experts everybody's favourite
    moe(x)
    before = loads([model])[0]
    assert before.max() > 2 * before.mean()
    assert before.min() < 0.2 * before.mean()
    for _ in range(300):
        apply_loads([model], loads([model]))
        moe(x)
    after = loads([model])[0]
    assert after.sum() == before.sum() == 4 * 256 * 2
    assert after.max() < 1.1 * after.mean()
    assert biases([model]).abs().max() > 0.01


def test_an_update_moves_each_bias_by_the_rate_towards_the_mean() -> None:
    load = torch.tensor([4, 0, 2, 2])
    assert torch.equal(balanced(torch.zeros(4), load, 0.5), torch.tensor([-0.5, 0.5, 0.0, 0.0]))
    assert torch.equal(balanced(torch.ones(4), load, 0.0), torch.ones(4))
    lopsided = balanced(torch.zeros(4), torch.tensor([9, 1, 1, 1]), 0.5)  # one step down, three up: all move, by a
    assert torch.equal(lopsided, torch.tensor([-0.75, 0.25, 0.25, 0.25]))  # rate between them, around zero


def test_loads_have_a_row_for_every_sparse_layer_whoever_holds_it() -> None:
    model = made(layers=4)
    whole = Decoder(shape(4))
    whole.load_state_dict(model.state_dict())
    whole(tokens())
    stages = [Decoder(model.shape, layers) for layers in (range(1), range(1, 3), range(3, 4))]
    x = tokens()
    for stage in stages:
        stage.load_state_dict({n: t for n, t in model.state_dict().items() if n in stage.state_dict()})
        x = stage(x)
    parts = [loads([stage]) for stage in stages]
    assert not parts[0].any()
    assert torch.equal(sum(parts), loads([whole]))
    assert torch.allclose(squares(stages[1:]), squares([whole]))
    assert torch.equal(loads(stages[1:]), loads([whole]))
    assert loads([whole]).sum(1).tolist() == [2 * 48] * 3

    apply_loads([whole], loads([whole]))
    apply_loads(stages, sum(parts))
    assert torch.equal(biases(stages), biases([whole]))
    assert biases([whole]).any()
    assert not loads([whole]).any()
    assert not squares([whole]).any()
    assert loads([Decoder(shape_of(Model(vocab_size=8, dim=8, layers=1, heads=1)))]).numel() == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputing_a_block_does_not_count_its_tokens_again(compiled: bool) -> None:
    def work(rank: int, world: int) -> None:
        model, plain = made(), made()
        for block in model.blocks.values():
            inner = block.forward
            block.forward = lambda *args, inner=inner: checkpoint(inner, *args, use_reentrant=False)
            if compiled:
                block.compile(backend="aot_eager")
        for _ in range(2):  # two micro-batches add up
            for m in (model, plain):
                m(tokens(), targets=tokens()).backward()
        assert torch.equal(loads([model]), loads([plain]))
        assert torch.equal(squares([model]), squares([plain]))
        assert loads([model]).sum(1).tolist() == [2 * 48 * 2] * 2
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")  # noqa: B023

    run_ranks(work, 1, timeout_s=120)  # elsewhere: a process that has compiled cannot fork ranks that compile


def test_a_token_costs_the_parameters_that_the_shape_calls_active() -> None:
    of = shape(layers=2, shared=1, top_k=3)
    model = Decoder(of)
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == of.params
    assert of.params - of.active_params == (6 - 3) * 3 * 16 * 20  # the experts of the one sparse layer that sit out
    moe = mixture(model)
    with FlopCounterMode(display=False) as counter:
        moe(random(2, 24, 16))
    matrices = of.dim * 6 + 3 * of.dim * 20 * (3 + 1)  # the router, three experts and the shared one
    adding_up = 3 * of.dim
    assert counter.get_total_flops() == 2 * 48 * (matrices + adding_up)


def test_evaluation_is_not_counted() -> None:
    model = made().eval()
    model(tokens())
    assert not loads([model]).any()


def test_bfloat16_follows_float32_and_the_router_stays_in_it() -> None:
    model = made()
    exact = model(tokens(), targets=tokens())
    kinds: list[torch.dtype] = []
    mixture(model).router.register_forward_hook(lambda _, __, out: kinds.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(tokens(), targets=tokens())
    torch.testing.assert_close(rounded, exact, rtol=2e-2, atol=0)
    assert rounded.item() != exact.item()
    assert kinds == [torch.float32]
    rounded.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_the_selection_bias_travels_with_the_weights_and_the_counts_do_not() -> None:
    names = set(made(layers=2).state_dict())
    assert {"blocks.1.ffn.bias", "blocks.1.ffn.router.weight", "blocks.1.ffn.experts.gate"} <= names
    assert not any(name.endswith((".load", ".z")) for name in names)
    assert not any("blocks.0.ffn" in name and ("router" in name or "experts" in name) for name in names)


def test_padding_is_computed_and_counts_nowhere() -> None:
    """Of the router's own losses, loads and squares: only what the other tokens make of them."""
    found = []
    for padded in (True, False):
        moe = mixture(made(z_loss=0.1, balance_loss=0.1))
        assert moe.excess is not None
        moe.excess.copy_(random(6))
        x, fills = random(2, 9, 16), torch.arange(9).expand(2, 9) >= torch.tensor([[7], [4]])
        y = moe(x, fills) if padded else moe(x[~fills][None])
        (y.reshape(-1, 16) * (random(16) if not padded else random(16) * ~fills.reshape(-1, 1))).sum().backward()
        found.append((moe.load.tolist(), moe.z.item(), moe.router.weight.grad))
    (loads_a, z_a, grad_a), (loads_b, z_b, grad_b) = found
    assert loads_a == loads_b
    assert sum(loads_a) == (7 + 4) * 2
    assert z_a == pytest.approx(z_b, rel=1e-5)
    torch.testing.assert_close(grad_a, grad_b, rtol=1e-4, atol=1e-5)


def test_a_single_normalised_weight_teaches_its_router_nothing() -> None:
    """Why the run file refuses it."""
    for normalize in (True, False):
        moe = mixture(made(top_k=1, z_loss=0.0, normalize=normalize))
        (moe(random(2, 9, 16)) * random(16)).sum().backward()
        assert bool(moe.router.weight.grad.abs().max() > 1e-4) is not normalize


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balance_loss_spreads_what_a_skewed_router_had_piled_up(score: str) -> None:
    model = made(layers=2, score=score, balance_rate=0.0, balance_loss=0.01)
    moe = mixture(model)
    x = random(4, 64, 16) + 1.5  # a common direction, which makes some experts everybody's favourite
    optimizer = torch.optim.Adam([moe.router.weight], lr=0.01)
    worst = []
    for step in range(120):
        optimizer.zero_grad()
        moe(x).sum().mul(0.0).backward()  # nothing but the router's own losses
        if step == 0:
            assert not biases([model]).any()
        load = loads([model])[0]
        worst.append(float(load.max() / load.mean()))
        apply_loads([model], loads([model]))
        optimizer.step()
    assert worst[0] > 2
    assert np.mean(worst[-10:]) < 1.35
    assert not biases([model]).any()
    assert "blocks.1.ffn.excess" in model.state_dict()  # it is there again when a run goes on


@pytest.mark.parametrize(
    ("family", "said", "rate", "loss"),
    [
        ("mixtral", {}, 0.0, 0.01),
        ("qwen3_moe", {}, 0.0, 0.01),
        ("dots1", {}, 1e-3, 0.0),
        ("mixtral", {"balance_rate": 1e-3}, 1e-3, 0.0),  # as in the file of a run from before there was a loss
        ("mixtral", {"balance_loss": 0.0}, 0.0, 0.0),
        ("dots1", {"balance_loss": 0.1}, 1e-3, 0.1),
    ],
)
def test_a_family_without_a_place_for_biases_is_balanced_by_a_loss(
    family: str, said: dict[str, float], rate: float, loss: float
) -> None:
    model = Model(family=family, vocab_size=8, experts=Experts(**EXPERTS | said))
    e = shape_of(model).experts
    assert e is not None
    assert (e.balance_rate, e.balance_loss) == (rate, loss)
