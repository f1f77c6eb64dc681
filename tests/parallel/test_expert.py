"""Experts dealt out to processes make of a batch what one process makes of it, wherever the router sends its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import SpecError
from shoal.model.decoder import Decoder
from shoal.model.loads import loads, sparse_layers
from shoal.model.moe import Experts, through_experts
from shoal.parallel import expert, recompute, tensor
from shoal.parallel.place import Place, lay_out
from shoal.parallel.shard import replicate, reshard, shard
from shoal.spec.mesh import Sizes
from shoal.spec.model import Experts as Mixture
from shoal.spec.model import Model
from shoal.spec.shape import Shape, shape_of
from tests.ranks import Rows, run_ranks
from tests.slow import some_slow

pytestmark = pytest.mark.usefixtures("kept_ranks")

BATCH, SEQ, VOCAB = 4, 16, 96
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default


def shape(**changes: Any) -> Shape:
    """Large weights, so that tokens differ and routers have opinions; a z-loss that shows in the gradients."""
    mixture = {"count": 8, "top_k": 2, "ffn_dim": 24, "shared": 1, "dense_layers": 1, "z_loss": 0.05, **changes}
    model = Model(
        vocab_size=VOCAB, dim=32, layers=3, heads=4, kv_heads=2, ffn_dim=40, init_std=0.2, experts=Mixture(**mixture)
    )
    return shape_of(model)


def a_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].masked_fill(torch.rand(BATCH, SEQ, generator=generator) < 0.2, -100)
    return {"x": tokens[:, :-1], "targets": targets}


def biased(decoder: Decoder, favourites: int) -> Decoder:
    """The first `favourites` experts get every token; 0 leaves the router alone."""
    for _, layer in sparse_layers([decoder]):
        layer.bias.zero_()
        layer.bias[:favourites] = 1e3
    return decoder


def whole(favourites: int = 0, **changes: Any) -> Decoder:
    decoder = Decoder(shape(**changes))
    decoder.init_weights(1)
    return biased(decoder, favourites)


def laid(place: Place, favourites: int = 0, mode: recompute.Mode = "none", bf16: bool = False, **changes: Any) -> Any:
    with torch.device("meta"):
        decoder = Decoder(shape(**changes))
    tensor.split(decoder, place)
    expert.split(decoder, place)
    recompute.apply(decoder, mode)
    shard(decoder, place, bf16)
    decoder.to_empty(device="cpu")
    decoder.init_weights(1)
    return replicate(biased(decoder, favourites), place)


def my_part(place: Place) -> dict[str, Tensor]:
    each, at = BATCH // place.sizes.dp, place.at["dp"]
    return {name: t[at * each : (at + 1) * each] for name, t in a_batch().items()}


def on_ranks(sizes: Sizes, work: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
    def rank(rank: int, world: int) -> Any:
        return work(lay_out(rank, world, torch.device("cpu"), sizes, experts=True), *args, **settings)

    return run_ranks(rank, sizes.world)


def summed(value: Tensor) -> Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def gradients(decoder: Decoder) -> dict[str, Any]:
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in decoder.named_parameters()
    }


def one_step(place: Place, **settings: Any) -> dict[str, Any]:
    model = laid(place, **settings)
    decoder = model.module if isinstance(model, DistributedDataParallel) else model
    loss = model(**my_part(place))
    loss.backward()
    # DDP divides by the number of processes; in a run the clipping takes that back.
    factor = place.world if model is not decoder else 1
    return {
        "loss": float(summed(loss)) / place.sizes.tp,
        "gradients": {name: factor * grad for name, grad in gradients(decoder).items()},
        "loads": summed(loads([decoder])),
        "held": sum(p.to_local().numel() for p in expert_parameters(decoder)) if model is decoder else 0,
        "all_dtensors": all(isinstance(p, DTensor) for p in decoder.parameters()),
    }


def expert_parameters(decoder: Decoder) -> list[Any]:
    return [p for name, p in decoder.named_parameters() if ".experts." in name]


def expected(**settings: Any) -> dict[str, Any]:
    decoder = whole(**settings)
    loss = decoder(**a_batch())
    loss.backward()
    return {"loss": float(loss.detach()), "gradients": gradients(decoder), "loads": loads([decoder])}


def agree(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(wanted["loss"], rel=2e-6)
    assert torch.equal(found["loads"], wanted["loads"])
    assert found["gradients"].keys() == wanted["gradients"].keys()
    for name, want in wanted["gradients"].items():
        got = found["gradients"][name]
        assert torch.allclose(got, want, rtol=1e-4, atol=2e-5 * float(want.abs().max())), name


MESHES = {
    "ep2": Sizes(dp_shard=2, ep=2),
    "ep4": Sizes(dp_shard=4, ep=4),
    "ep2 x fsdp2": Sizes(dp_shard=4, ep=2),
    "ep2 x replicate2": Sizes(dp_replicate=2, dp_shard=2, ep=2),
    "ep2 over tp2": Sizes(tp=2, ep=2),
    "ep2 over tp2, fsdp2": Sizes(dp_shard=2, tp=2, ep=2),
    "ep4 over fsdp2 x tp2": Sizes(dp_shard=2, tp=2, ep=4),
    "tp2, experts sharded": Sizes(tp=2),
    "replicate2 x tp2, experts in HSDP": Sizes(dp_replicate=2, tp=2),
    "fsdp2": Sizes(dp_shard=2),
    "ddp2": Sizes(dp_replicate=2),
}
LARGE = ("ep2 over tp2, fsdp2", "ep4 over fsdp2 x tp2", "replicate2 x tp2, experts in HSDP")  # four, some with DTensors
RECOMPUTED, MODES = ["ep2 x fsdp2", "ep2 x replicate2", "tp2, experts sharded"], ["selective", "full"]


SKEWED = [{"favourites": top_k, "top_k": top_k} for top_k in (1, 2)]
STEPS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in MESHES),
    *((name, {"mode": mode}) for name in RECOMPUTED for mode in MODES),
    *((name, settings) for name in ("ep4", "ep2 x fsdp2") for settings in SKEWED),
    ("ep2 x fsdp2", {"count": 6}),
    *((name, {"bf16": True}) for name in ("ep2", "ep2 x fsdp2")),
]


def step(name: str, **settings: Any) -> str:
    return f"{name} {settings}"


@pytest.fixture(scope="module")
def steps() -> Rows:
    """One step of each mesh with its settings, by `step`: a value a process."""

    def rank(rank: int, world: int, given: tuple[Sizes, dict[str, Any]]) -> dict[str, Any]:
        sizes, settings = given
        return one_step(lay_out(rank, world, torch.device("cpu"), sizes, experts=True), **settings)

    rows = {step(n, **settings): (MESHES[n].world, (MESHES[n], settings)) for n, settings in STEPS}
    return Rows(rank, rows, slow=[step(name) for name in LARGE])


@pytest.mark.parametrize("name", some_slow(MESHES, slow=LARGE))
def test_loss_loads_and_every_gradient_are_those_of_one_process(name: str, steps: Rows) -> None:
    sizes = MESHES[name]
    wanted = expected()
    for found in steps[step(name)]:
        agree(found, wanted)
        assert found["all_dtensors"] or sizes.tp == 1
        if name != "ddp2":
            numbers = sum(p.numel() for p in expert_parameters(whole()))
            assert found["held"] == numbers // (sizes.world // sizes.dp_replicate), "each holds its share and no more"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputation_sends_the_tokens_again_and_changes_nothing(name: str, mode: str, steps: Rows) -> None:
    wanted = expected()
    for found in steps[step(name, mode=mode)]:
        agree(found, wanted)


@pytest.mark.parametrize("settings", SKEWED, ids=lambda s: str(s["top_k"]))
@pytest.mark.parametrize("name", ["ep4", "ep2 x fsdp2"])
def test_processes_whose_experts_nobody_asks_for_wait_for_none(
    name: str, settings: dict[str, int], steps: Rows
) -> None:
    """All tokens go to the first one or two experts: every process but the first receives nothing at all."""
    wanted = expected(**settings)
    assert float(wanted["loads"][0, settings["top_k"] :].sum()) == 0
    for found in steps[step(name, **settings)]:
        agree(found, wanted)


def test_experts_that_do_not_divide_are_cut_across_instead(steps: Rows) -> None:
    """Six experts over ep 2 leave three a process, which two cannot share: their matrices are cut."""
    wanted = expected(count=6)
    for found in steps[step("ep2 x fsdp2", count=6)]:
        agree(found, wanted)


def test_experts_that_ep_does_not_divide_are_refused() -> None:
    def rank(place: Place) -> str:
        with pytest.raises(SpecError, match=r"9 experts cannot be shared equally by mesh\.ep = 2 processes") as refused:
            laid(place, count=9)
        return str(refused.value)

    assert "divisor of model.experts.count" in on_ranks(MESHES["ep2"], rank)[0]


@pytest.mark.parametrize("name", ["ep2 x fsdp2", "ep2 over tp2"])
def test_evaluation_between_steps_meets_too_and_counts_no_loads(name: str) -> None:
    def rank(place: Place) -> dict[str, Any]:
        decoder = laid(place)
        decoder.eval()
        with torch.no_grad():
            evaluated = summed(decoder(**my_part(place)))
        reshard(decoder)
        decoder.train()
        counted = loads([decoder])
        loss = decoder(**my_part(place))
        loss.backward()
        return {
            "evaluated": float(evaluated) / place.sizes.tp,
            "counted": float(counted.sum()),
            "loss": float(summed(loss)) / place.sizes.tp,
            "gradients": gradients(decoder),
            "loads": summed(loads([decoder])),
        }

    wanted = expected()
    for found in on_ranks(MESHES[name], rank):
        assert found["evaluated"] == pytest.approx(wanted["loss"], rel=2e-6)
        assert found["counted"] == 0
        agree(found, wanted)


def test_gradients_of_several_micro_batches_add_up() -> None:
    def rank(place: Place) -> dict[str, Any]:
        decoder = laid(place)
        for i in range(2):
            decoder.set_requires_gradient_sync(i == 1)
            decoder(**my_part(place)).backward()
        return gradients(decoder)

    wanted = expected()["gradients"]
    for found in on_ranks(MESHES["ep2 x fsdp2"], rank):
        for name, grad in wanted.items():
            assert torch.allclose(found[name], 2 * grad, rtol=1e-4, atol=4e-5 * float(grad.abs().max())), name


@pytest.mark.parametrize("name", ["ep2", "ep2 x fsdp2"])
def test_bfloat16_computes_near_float32_with_float32_gradients(name: str, steps: Rows) -> None:
    """Experts that FSDP leaves alone (`ep2`) are cast where they are used."""
    wanted = expected()
    for found in steps[step(name, bf16=True)]:
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-2)
        for key, want in wanted["gradients"].items():
            got = found["gradients"][key]
            assert got.dtype == torch.float32
            if ".experts." in key:
                assert float((got - want).norm() / want.norm()) < 0.25, key


class Sent(TorchDispatchMode):
    """Bytes that leave this process by all-to-alls, and how many of those there are."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.calls = rank, 0
        self.rows_bytes, self.counts_bytes = 0, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is ALL_TO_ALL:
            x, splits = args[0], args[2]
            row_bytes = math.prod(x.shape[1:]) * x.element_size()
            leaving = sum(n for peer, n in enumerate(splits) if peer != self.rank) * row_bytes
            self.calls += 1
            if x.is_floating_point():
                self.rows_bytes += leaving
            else:
                self.counts_bytes += leaving
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("even", [True, False])
def test_tokens_are_sent_once_each_way_and_only_to_others(even: bool) -> None:
    """Evenly chosen, each all-to-all takes tokens x top_k x dim x (ep - 1) / ep numbers from each process; else all
    together as many rows as there are pairs of a token and an expert that lives elsewhere. Two go forward, two back."""
    tokens, dim, top_k, count, ep = 24, 16, 2, 8, 4

    def choose(rank: int) -> Tensor:
        if even:
            return torch.arange(tokens * top_k).view(tokens, top_k) % count
        generator = torch.Generator().manual_seed(rank)
        return torch.rand(tokens, count, generator=generator).square().topk(top_k).indices // (1 + rank % 2)

    def rank(rank: int, world: int) -> tuple[int, int, int, int]:
        torch.manual_seed(0)
        x = torch.randn(tokens, dim, requires_grad=True)
        here, everywhere = Experts(count // ep, dim, 8), Experts(count, dim, 8)
        with torch.no_grad():
            for mine, full in zip(here.parameters(), everywhere.parameters(), strict=True):
                full.normal_()
                mine.copy_(full.chunk(ep)[rank])
        # As after `split`: the whole's size, this process's part of the numbers.
        mesh = init_device_mesh("cpu", (ep,))
        for name, parameter in list(here.named_parameters()):
            whole = DTensor.from_local(parameter.detach(), mesh, [expert.Shard(0)])
            setattr(here, name, torch.nn.Parameter(whole))
        here.compute = expert._on_own_part
        chosen = choose(rank)
        with Sent(rank) as sent:
            y = expert.through_peers(here, x, chosen, mesh.get_group())
            (grad,) = torch.autograd.grad(y.square().sum(), x)
        alone = through_experts(everywhere, x, chosen)
        (wanted,) = torch.autograd.grad(alone.square().sum(), x)
        assert torch.allclose(y, alone, rtol=1e-5, atol=1e-5)
        assert torch.allclose(grad, wanted, rtol=1e-4, atol=1e-4)
        elsewhere = int((chosen // (count // ep) != rank).sum())
        return sent.calls, sent.rows_bytes, sent.counts_bytes, elsewhere

    sent = run_ranks(rank, ep)
    row_bytes = dim * 4
    for calls, rows_bytes, counts_bytes, _ in sent:
        assert calls == 5  # one of them tells how many rows will come
        assert counts_bytes == (ep - 1) * (count // ep) * 8
        if even:
            assert rows_bytes == 4 * tokens * top_k * row_bytes * (ep - 1) // ep
    assert sum(rows for _, rows, _, _ in sent) == 4 * row_bytes * sum(elsewhere for *_, elsewhere in sent)
