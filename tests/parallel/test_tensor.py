"""A model cut over the tensor-parallel axis has the losses, gradients and logits of the whole one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import UsageError
from shoal.model.decoder import Decoder
from shoal.model.init import local_box
from shoal.parallel.place import Place, lay_out
from shoal.parallel.tensor import split
from shoal.spec.mesh import Sizes
from shoal.spec.model import Model
from shoal.spec.shape import Shape, shape_of
from tests.ranks import Rows, run_ranks
from tests.slow import some_slow

pytestmark = pytest.mark.usefixtures("kept_ranks")

SMALL: dict[str, Any] = {"vocab_size": 136, "dim": 32, "layers": 3, "heads": 8, "kv_heads": 4, "ffn_dim": 40}
# Large weights, so that attention is far from uniform and a wrong angle, mask or head shows.
FAMILIES = {
    "llama": Model(family="llama", init_std=0.2, **SMALL),
    "llama tied, all biases": Model(
        family="llama", init_std=0.2, tie_embeddings=True, qkv_bias=True, out_bias=True, mlp_bias=True, **SMALL
    ),
    "qwen2 sliding": Model(
        family="qwen2", init_std=0.2, qkv_bias=True, sliding_window=5, full_attention_layers=1, **SMALL
    ),
    "shared expert": Model(
        family="qwen3",
        init_std=0.2,
        experts={"count": 4, "top_k": 2, "ffn_dim": 16, "shared": 2, "dense_layers": 1},
        **SMALL,
    ),
    "qwen3 tied": Model(family="qwen3", init_std=0.2, qk_norm=True, tie_embeddings=True, head_dim=6, **SMALL),
}
BATCH, SEQ = 4, 16


def shape(family: str) -> Shape:
    return shape_of(FAMILIES[family])


def a_batch(packed: bool) -> dict[str, Tensor]:
    """Tokens and targets, some of which do not count; packed: several documents a row, counted from 0 each."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, SMALL["vocab_size"], (BATCH, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].masked_fill(torch.rand(BATCH, SEQ, generator=generator) < 0.2, -100)
    batch = {"x": tokens[:, :-1], "targets": targets}
    if packed:
        ends = torch.rand(BATCH, SEQ, generator=generator) < 0.25
        batch["documents"] = ends.cumsum(1) - ends.long()
        starts = torch.where(torch.cat((torch.ones(BATCH, 1).bool(), ends[:, :-1]), 1), torch.arange(SEQ), 0)
        batch["positions"] = torch.arange(SEQ) - starts.cummax(1).values
    return batch


def whole(family: str) -> Decoder:
    decoder = Decoder(shape(family))
    decoder.init_weights(1)
    return stirred(decoder)


def cut(family: str, place: Place, layers: range | None = None, policy: MixedPrecisionPolicy | None = None) -> Decoder:
    """Over tp, and with FSDP2 above it where the place has such an axis."""
    with torch.device("meta"):
        decoder = Decoder(shape(family), layers)
    split(decoder, place)
    if place.sizes.dp > 1:
        assert place.dense is not None
        for module in (*decoder.blocks.values(), decoder):
            sharded = fully_shard(module, mesh=place.dense["shard"], mp_policy=policy or MixedPrecisionPolicy())
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_gradient_divide_factor(1.0)
    decoder.to_empty(device="cpu")
    decoder.init_weights(1)
    return stirred(decoder)


@torch.no_grad()
def stirred(decoder: Decoder) -> Decoder:
    """Norms and biases off their ones and zeros, which would hide a missing one."""
    for name, parameter in decoder.named_parameters():
        if parameter.ndim == 1:
            noise = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.4 - 0.2
            local, box = local_box(parameter)
            local += noise[box]
    return decoder


def whole_of(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def grads(decoder: Decoder) -> dict[str, Tensor]:
    return {name: whole_of(p.grad) for name, p in decoder.named_parameters()}


def off(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each tensor, relative to its largest number."""
    assert found.keys() == expected.keys()
    return {n: float((found[n] - t).abs().max() / t.abs().max()) for n, t in expected.items()}


def on_ranks(sizes: Sizes, work: Callable[..., Any], *args: Any) -> Any:
    def rank(rank: int, world: int) -> Any:
        return work(lay_out(rank, world, torch.device("cpu"), sizes), *args)

    return run_ranks(rank, sizes.world)


def share_of(place: Place, packed: bool) -> dict[str, Tensor]:
    """The rows of the batch that this reader of data has."""
    each, mine = BATCH // place.sizes.dp, place.at["dp"]
    return {name: t[mine * each : (mine + 1) * each] for name, t in a_batch(packed).items()}


def one_step(place: Place, family: str, packed: bool) -> dict[str, Any]:
    decoder, batch = cut(family, place), share_of(place, packed)
    assert all(isinstance(p, DTensor) for p in decoder.parameters())
    weights = {name: whole_of(p.detach()) for name, p in decoder.named_parameters()}
    loss = decoder(**batch)
    loss.backward()
    gradients = grads(decoder)
    with torch.no_grad():
        evaluated = decoder(**batch)
        del batch["targets"]
        logits = decoder(**batch)
    return {"weights": weights, "loss": loss.item(), "eval": evaluated.item(), "grads": gradients, "logits": logits}


MESHES = {"tp2": Sizes(tp=2), "tp4": Sizes(tp=4), "fsdp2 x tp2": Sizes(dp_shard=2, tp=2)}
CASES = [
    ("llama", "tp2", False),
    ("llama", "tp4", True),
    ("llama", "fsdp2 x tp2", True),
    ("llama tied, all biases", "tp2", True),
    ("llama tied, all biases", "fsdp2 x tp2", False),
    ("qwen2 sliding", "tp2", True),
    ("qwen3 tied", "tp4", True),
    ("qwen3 tied", "fsdp2 x tp2", True),
]
LARGE = [case for case in CASES if MESHES[case[1]].world > 2 and case[0] != "llama"]


@pytest.fixture(scope="module")
def steps() -> Rows:
    def rank(rank: int, world: int, given: tuple[str, str, bool]) -> dict[str, Any]:
        family, mesh, packed = given
        return one_step(lay_out(rank, world, torch.device("cpu"), MESHES[mesh]), family, packed)

    return Rows(rank, {str(case): (MESHES[case[1]].world, case) for case in CASES}, slow=[str(case) for case in LARGE])


@pytest.mark.parametrize(("family", "mesh", "packed"), some_slow(CASES, slow=LARGE))
def test_weights_loss_gradients_and_logits_are_those_of_one_process(
    family: str, mesh: str, packed: bool, steps: Rows
) -> None:
    model, batch, sizes = whole(family), a_batch(packed), MESHES[mesh]
    loss = model(**batch)
    loss.backward()
    del batch["targets"]
    logits = model(**batch).detach()
    found = steps[str((family, mesh, packed))]
    for of_rank in found:
        assert all(torch.equal(of_rank["weights"][n], p) for n, p in model.named_parameters())
        worst = off(of_rank["grads"], grads(model))
        assert max(worst.values()) < 2e-5, worst
    readers = found[:: sizes.tp]
    assert [of_rank["loss"] for of_rank in found] == [r["loss"] for r in readers for _ in range(sizes.tp)]
    assert sum(r["loss"] for r in readers) == pytest.approx(loss.item(), rel=2e-6)
    assert sum(r["eval"] for r in readers) == pytest.approx(loss.item(), rel=2e-6)
    torch.testing.assert_close(torch.cat([r["logits"] for r in readers]), logits, atol=1e-4, rtol=1e-4)


def test_stretches_of_a_pipeline_hand_on_their_parts_of_the_sequence() -> None:
    family = "qwen3 tied"

    def stages(place: Place) -> tuple[float, dict[str, Tensor], list[tuple[int, ...]]]:
        parts = [cut(family, place, range(i, i + 1)) for i in range(3)]
        batch, shapes = a_batch(packed=True), []
        targets, x = batch.pop("targets"), batch.pop("x")
        for part in parts:
            x = part(x, **batch, targets=targets)
            shapes.append(tuple(x.shape))
        x.backward()
        found: dict[str, Tensor] = {}
        for part in parts:  # the tied embedding is on the first and the last
            for name, gradient in grads(part).items():
                found[name] = found[name] + gradient if name in found else gradient
        return x.item(), found, shapes

    model = whole(family)
    loss = model(**a_batch(packed=True))
    loss.backward()
    for value, gradients, shapes in on_ranks(Sizes(tp=2), stages):
        assert shapes == [(BATCH, SEQ // 2, SMALL["dim"])] * 2 + [()]
        assert value == pytest.approx(loss.item(), rel=2e-6)
        assert max(off(gradients, grads(model)).values()) < 2e-5


def test_a_mixture_of_experts_routes_the_tokens_of_its_own_stretch() -> None:
    family = "shared expert"

    def step(place: Place) -> tuple[float, dict[str, Tensor]]:
        decoder = cut(family, place)
        loss = decoder(**a_batch(packed=True))
        loss.backward()
        held_whole = [n for n, p in decoder.named_parameters() if not isinstance(p, DTensor)]
        assert all(".experts." in name for name in held_whole), "and they are for expert parallelism to deal out"
        for name in held_whole:  # here every process has them all, and the gradients of its own tokens
            dist.all_reduce(decoder.get_parameter(name).grad)
        return loss.item(), grads(decoder)

    model = whole(family)
    loss = model(**a_batch(packed=True))
    loss.backward()
    for value, gradients in on_ranks(Sizes(tp=2), step):
        assert value == pytest.approx(loss.item(), rel=2e-6)
        worst = off(gradients, grads(model))
        assert max(worst.values()) < 2e-5, worst


def test_bfloat16_by_autocast_and_by_fsdp_stays_near_float32() -> None:
    family = "qwen3 tied"

    def step(place: Place) -> tuple[float, dict[str, Tensor]]:
        decoder = cut(family, place, policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        with torch.autocast("cpu", torch.bfloat16, enabled=place.sizes.dp == 1):
            loss = decoder(**share_of(place, packed=True))
        loss.backward()
        return loss.item(), grads(decoder)

    def alike(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        flat_a, flat_b = (torch.cat([g[n].flatten() for n in a]) for g in (a, b))
        return float(torch.cosine_similarity(flat_a, flat_b, dim=0))

    model = whole(family)
    loss = model(**a_batch(packed=True))
    loss.backward()
    for sizes in (Sizes(tp=2), Sizes(dp_shard=2, tp=2)):
        found = on_ranks(sizes, step)
        assert sum(value for value, _ in found[::2]) == pytest.approx(loss.item(), rel=5e-3)
        assert all(alike(gradients, grads(model)) > 0.999 for _, gradients in found)


class Traffic(TorchDispatchMode):
    """What functional collectives are called, how often, and of what type."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if func.namespace == "_c10d_functional" and ("gather" in name or "reduce" in name):
            self.calls[name, args[0].dtype] += 1
        return func(*args, **kwargs or {})


def test_a_block_gathers_twice_and_scatters_twice_each_way_in_the_compute_type() -> None:
    def step(place: Place) -> list[dict[tuple[str, torch.dtype], int]]:
        found = []
        for bf16 in (False, True):
            decoder = cut("llama", place)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16), Traffic() as forward:
                loss = decoder(**a_batch(packed=True))
            with Traffic() as backward:
                loss.backward()
            found += [dict(forward.calls), dict(backward.calls)]
        return found

    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    f32, b16 = torch.float32, torch.bfloat16
    blocks = SMALL["layers"]
    # The embedding: one scatter, one gather back. The loss: its tokens gathered, then three numbers of each, and the
    # gradient scattered at once.
    forward, backward, narrow_forward, narrow_backward = on_ranks(Sizes(tp=2), step)[0]
    assert forward == {(gather, f32): 2 * blocks + 2, (scatter, f32): 2 * blocks + 2}
    assert backward == {(gather, f32): 2 * blocks + 1, (scatter, f32): 2 * blocks}
    # Under autocast the residual stream is float32, but what is gathered and scattered inside blocks is not.
    assert narrow_forward == {
        (gather, b16): 2 * blocks + 1,
        (gather, f32): 1,
        (scatter, b16): 2 * blocks + 1,
        (scatter, f32): 1,
    }
    assert narrow_backward == {(gather, b16): 2 * blocks, (gather, f32): 1, (scatter, b16): 2 * blocks}


def test_a_sequence_that_cannot_be_shared_equally_is_refused() -> None:
    def step(place: Place) -> str:
        with pytest.raises(UsageError) as refusal:
            cut("llama", place)(torch.zeros(1, 7, dtype=torch.long))
        return str(refusal.value)

    assert "7 tokens cannot be shared equally by mesh.tp = 2" in on_ranks(Sizes(tp=2), step)[0]


def test_one_process_on_the_axis_changes_nothing() -> None:
    decoder = whole("llama")
    split(decoder, Place(0, 1, torch.device("cpu")))
    assert not any(isinstance(p, DTensor) for p in decoder.parameters())
