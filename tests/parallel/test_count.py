"""What a step sends is counted, all of it, by axis: the count is what the formula says, for every axis."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.utils.checkpoint import checkpoint

from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.parallel import count
from shoal.parallel.count import Counter, axes, due, together
from shoal.parallel.place import Place, lay_out
from shoal.plan.traffic import step_of, traffic
from shoal.spec import load
from shoal.spec.mesh import Sizes
from shoal.spec.shape import shape_of
from tests.parallel.counted import assert_as_the_formula_says, record_of
from tests.ranks import run_ranks
from tests.slow import some_slow
from tests.train.tiny import digest_of, losses_of, make_data, make_run, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")

MOE = {"count": 4, "top_k": 4, "ffn_dim": 32}  # every token to every expert: what travels is known beforehand
# The tiny model has 2 layers; 8 windows of 32 tokens a step, 2 of them at once. Other meshes are counted where they are
# trained anyway: tests/train/test_matrix.py.
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "DDP": (2, {"dp_replicate": 2}),
    "FSDP in bf16": (2, {"dp_shard": 2, "train.precision": "bf16"}),
    "HSDP": (4, {"dp_replicate": 2, "dp_shard": 2, "model.dim": 24, "model.head_dim": 6, "model.ffn_dim": 50}),
    "TP x FSDP, recomputed": (4, {"tp": 2, "dp_shard": 2, "recompute": "full", "micro_batch": 4}),
    "CP by all_to_all, all but attention recomputed": (
        2,
        {"cp": 2, "cp_method": "all_to_all", "recompute": "attention", "micro_batch": 4},
    ),
    "CP by ring x TP, all but attention recomputed": (
        4,
        {"cp": 2, "tp": 2, "cp_method": "ring", "recompute": "attention", "micro_batch": 4},
    ),
    "CP by ring": (2, {"cp": 2, "cp_method": "ring", "recompute": "selective", "micro_batch": 4}),
    "PP, tied": (2, {"pp": 2, "model.tie_embeddings": True}),
    "PP, one stage without experts": (2, {"pp": 2, "model.experts": {**MOE, "dense_layers": 1}}),
    "TP of state spaces in groups, recomputed": (
        2,
        {
            "tp": 2,
            "recompute": "full",
            "model.family": "bamba",
            "model.mamba": {"attention_layers": [1], "heads": 4, "state_dim": 8, "groups": 2},
        },
    ),
    "EP x FSDP": (4, {"dp_shard": 4, "ep": 2, "model.experts": MOE}),
}
PRODUCTS = (
    "HSDP",
    "TP x FSDP, recomputed",
    "CP by ring x TP, all but attention recomputed",
    "TP of state spaces in groups, recomputed",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def trained(data: Path, workspace: Path, world: int, **changes: Any) -> RunDir:
    settings = {key if "." in key else f"mesh.{key}": value for key, value in {"micro_batch": 2, **changes}.items()}
    few = {"train.steps": 3, "train.batch": 8, "train.schedule.warmup_steps": 1}
    return train_on(make_run(data, **{**few, **settings}), workspace, world)


@pytest.mark.parametrize("mesh", some_slow(MESHES, slow=PRODUCTS))
def test_a_run_counts_its_third_step_and_the_formula_says_the_same(mesh: str, data: Path, tmp_path: Path) -> None:
    world, changes = MESHES[mesh]
    assert_as_the_formula_says(trained(data, tmp_path, world, **changes), world)


def test_what_a_router_sends_is_what_the_even_spread_would_be_or_close(data: Path, tmp_path: Path) -> None:
    """The one number that depends on the data: tokens that stay on their process are not sent."""
    run_dir = trained(data, tmp_path, 2, dp_shard=2, ep=2, **{"model.experts": {**MOE, "top_k": 1, "normalize": False}})
    run = load(run_dir.spec_file).run
    (row,) = [r for r in record_of(run_dir)["rows"] if r["axis"] == "ep"]
    calls, even_bytes = traffic(step_of(run, shape_of(run.model)))["ep", "all_to_all"]
    assert row["calls"] == calls
    assert 0.25 * even_bytes < row["bytes"] < 2 * even_bytes  # twice: every token leaves


def test_counting_changes_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = trained(data, tmp_path / "counted", 2, dp_shard=2, recompute="selective")
    monkeypatch.setattr("shoal.train.builtin_hooks.due", lambda *args, **more: False)
    plain = trained(data, tmp_path / "plain", 2, dp_shard=2, recompute="selective")
    assert [r["kind"] for r in records(plain.journal_file)].count("traffic") == 0
    assert (losses_of(counted) == losses_of(plain)).all()
    assert digest_of(counted) == digest_of(plain)


def test_the_third_step_is_due_and_with_experts_others_later() -> None:
    last = [due(step, 10 - step, varies=False) for step in range(10)]
    assert last == [step == 2 for step in range(10)]
    assert due(0, 1, varies=False), "a run of one step has no other"
    assert due(1, 1, varies=False)
    assert not due(0, 2, varies=False)
    assert not due(500, 9, varies=False)
    assert due(500, 9, varies=True)


# Each sends 12 float32 from every one of 3 processes, in one call.
CONVENTION: dict[str, tuple[Callable[[dist.ProcessGroup, int], object], str, list[float]]] = {
    "all_gather": (lambda g, r: dist.all_gather([ones(12)] * 3, ones(12), group=g), "all_gather", [96] * 3),
    "all_gather_into_tensor": (
        lambda g, r: dist.all_gather_into_tensor(ones(36), ones(12), group=g),
        "all_gather",
        [96] * 3,
    ),
    "functional all_gather": (lambda g, r: funcol.all_gather_tensor(ones(12), 0, g).add(0), "all_gather", [96] * 3),
    "coalesced all_gather": (
        lambda g, r: [t.add(0) for t in funcol.all_gather_into_tensor_coalesced([ones(8), ones(4)], g)],
        "all_gather",
        [96] * 3,
    ),
    "reduce_scatter": (lambda g, r: dist.reduce_scatter(ones(4), [ones(4)] * 3, group=g), "reduce_scatter", [32] * 3),
    "reduce_scatter_tensor": (
        lambda g, r: dist.reduce_scatter_tensor(ones(4), ones(12), group=g),
        "reduce_scatter",
        [32] * 3,
    ),
    "functional reduce_scatter": (
        lambda g, r: funcol.reduce_scatter_tensor(ones(12), "sum", 0, g).add(0),
        "reduce_scatter",
        [32] * 3,
    ),
    "all_reduce": (lambda g, r: dist.all_reduce(ones(12), group=g), "all_reduce", [64] * 3),
    "functional all_reduce": (lambda g, r: funcol.all_reduce(ones(12), "sum", g).add(0), "all_reduce", [64] * 3),
    "coalesced all_reduce": (lambda g, r: coalesced(g), "all_reduce", [64] * 3),
    "all_to_all": (lambda g, r: dist.all_to_all_single(ones(12), ones(12), group=g), "all_to_all", [32] * 3),
    "list all_to_all": (lambda g, r: dist.all_to_all([ones(4)] * 3, [ones(4)] * 3, group=g), "all_to_all", [32] * 3),
    # Process r sends r + 1, 2 and 9 - r numbers to the three.
    "uneven all_to_all": (lambda g, r: uneven(g, r), "all_to_all", [44, 40, 20]),
    "send": (lambda g, r: around(g, r), "send", [48] * 3),
    "broadcast": (lambda g, r: dist.broadcast(ones(12), group_src=1, group=g), "broadcast", [48, 0, 48]),
    "reduce": (lambda g, r: dist.reduce(ones(12), group_dst=1, group=g), "reduce", [48, 0, 48]),
    "gather": (
        lambda g, r: dist.gather(ones(12), [ones(12)] * 3 if r == 1 else None, group_dst=1, group=g),
        "gather",
        [48, 0, 48],
    ),
    "scatter": (
        lambda g, r: dist.scatter(ones(12), [ones(12)] * 3 if r == 1 else None, group_src=1, group=g),
        "scatter",
        [48, 0, 48],
    ),
    "barrier": (lambda g, r: dist.barrier(group=g), "barrier", [0] * 3),
}


def ones(n: int) -> torch.Tensor:
    return torch.ones(n)


def coalesced(group: dist.ProcessGroup) -> None:
    with dist._coalescing_manager(group):
        dist.all_reduce(ones(8), group=group)
        dist.all_reduce(ones(4), group=group)


def uneven(group: dist.ProcessGroup, rank: int) -> torch.Tensor:
    splits = [[r + 1, 2, 9 - r] for r in range(3)]
    theirs = [s[rank] for s in splits]
    return funcol.all_to_all_single(ones(12), theirs, splits[rank], group).add(0)


def around(group: dist.ProcessGroup, rank: int) -> None:
    ops = [
        dist.P2POp(dist.isend, ones(12), group=group, group_peer=(rank + 1) % 3),
        dist.P2POp(dist.irecv, ones(12), group=group, group_peer=(rank - 1) % 3),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def test_bytes_of_every_operation_follow_the_convention() -> None:
    def work(rank: int, world: int) -> dict[str, list[count.Row]]:
        place = lay_out(rank, world, torch.device("cpu"), Sizes(tp=3))
        assert place.dense is not None
        counter, tables = Counter(place), {}
        for name, (send, _, _) in CONVENTION.items():
            with counter.counting():
                send(place.dense.get_group("tp"), rank)
            tables[name] = counter.table()
        return tables

    for rank, tables in enumerate(run_ranks(work, 3)):
        for name, (_, op, sizes) in CONVENTION.items():
            row = {"axis": "tp", "op": op, "group": 3, "calls": 1, "bytes": sizes[rank]}
            assert tables[name] == [row], f"{name} on rank {rank}"


@torch.library.custom_op("shoal::test_count_sum", mutates_args=())
def summed_within(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y


summed_within.register_fake(torch.empty_like)
summed_within.register_autograd(lambda ctx, grad: summed_within(grad), setup_context=lambda ctx, inputs, output: None)


@pytest.mark.usefixtures("fresh_ranks")
def test_backward_recomputed_and_compiled_computation_and_operators_of_our_own_are_seen() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        moved = funcol.all_to_all_single_autograd(x.sin(), None, None, dist.group.WORLD)
        return summed_within(moved).cos()

    def work(rank: int, world: int) -> tuple[list[list[Any]], bool, int]:
        place = lay_out(rank, world, torch.device("cpu"), Sizes(dp_shard=2))
        counter = Counter(place)
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
            block,
            lambda x: checkpoint(block, x, use_reentrant=False),
            compiled,
        ]
        tables, grads = [], []
        for way in ways:
            way(torch.ones(4, requires_grad=True)).sum().backward()
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            x = torch.ones(4, requires_grad=True)
            with counter.counting():
                way(x).sum().backward()
            tables.append([[row["op"], row["calls"]] for row in counter.table()])
            grads.append(x.grad)
        again = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
        return tables, all(torch.equal(g, grads[0]) for g in grads), again

    import_module("torch._dynamo.backends.debugging")  # seconds; once, before the ranks are forked
    for tables, equal, compiled_again in run_ranks(work, 2, timeout_s=180):
        assert tables[0] == [["all_reduce", 2], ["all_to_all", 2]], "forward and backward"
        assert tables[1] == [["all_reduce", 3], ["all_to_all", 3]], "and the forward pass once more"
        assert tables[2] == tables[0], "compiled"
        assert equal
        assert compiled_again == 0


@torch.library.custom_op("shoal::test_count_joined", mutates_args=())
def joined_within(pieces: list[torch.Tensor], more: list[torch.Tensor]) -> torch.Tensor:
    """As fp8's casts: no argument is a tensor itself."""
    y = torch.cat(pieces + more)
    dist.all_reduce(y)
    return y


@torch.library.custom_op("shoal::test_count_none", mutates_args=())
def made_within(size: int) -> torch.Tensor:
    y = torch.ones(size)
    dist.all_reduce(y)
    return y


@pytest.mark.usefixtures("fresh_ranks")
def test_operators_of_our_own_whose_tensors_are_in_lists_or_nowhere_are_counted() -> None:
    def work(rank: int, world: int) -> list[tuple[float, float]]:
        counter, seen = Counter(lay_out(rank, world, torch.device("cpu"), Sizes(dp_shard=2))), []
        for send in (
            lambda: joined_within([ones(2), ones(1)], []),
            lambda: joined_within([ones(3)], more=[ones(1)]),
            lambda: joined_within(pieces=[ones(3)], more=[]),
            lambda: made_within(3),
        ):
            with counter.counting():
                made = send()
            (row,) = counter.table()
            seen.append((row["bytes"], float(made.sum())))
        return seen

    assert run_ranks(work, 2) == [[(12, 6.0), (16, 8.0), (12, 6.0), (12, 6.0)]] * 2


def test_axes_over_the_same_processes_are_told_apart() -> None:
    def work(rank: int, world: int) -> list[str]:
        place = lay_out(rank, world, torch.device("cpu"), Sizes(cp=2, ep=2), experts=True)
        return sorted(axes(place).values())

    assert run_ranks(work, 2)[0] == ["all", "cp", "ep", "shard"]


def test_a_group_that_two_axes_share_has_both_names_and_a_strange_one_its_own() -> None:
    def work(rank: int, world: int) -> list[str]:
        place = lay_out(rank, world, torch.device("cpu"), Sizes(dp_shard=2))
        assert place.dense is not None
        shared = Place(rank, world, place.device, place.sizes, place.dense, place.dense.get_group("shard"))
        strange = dist.new_group([0, 1], group_desc="stranger")
        counter = Counter(shared)
        with counter.counting():
            dist.all_reduce(torch.ones(1), group=place.dense.get_group("shard"))
            dist.all_reduce(torch.ones(1), group=strange)
            dist.all_reduce(torch.ones(1), group=place.dense.get_group("tp"))  # of one process: nothing is sent
        return [row["axis"] for row in counter.table()]

    assert run_ranks(work, 2)[0] == ["shard=cp", "stranger"]


def test_a_step_that_fails_leaves_no_mode_behind() -> None:
    counter = Counter(Place(0, 1, torch.device("cpu")))
    with pytest.raises(RuntimeError), counter.counting():
        torch.ones(2) @ torch.ones(3)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert counter.table() == []
    assert together([]) == []


def test_tables_of_unlike_stages_are_brought_together() -> None:
    def work(rank: int, world: int) -> list[count.Row]:
        mine = [{"axis": "all", "op": "all_reduce", "group": 3, "calls": 1, "bytes": 10 + rank}]
        mine += [{"axis": "pp", "op": "send", "group": 3, "calls": rank, "bytes": 100 * rank}] if rank else []
        return together(mine)

    tables = run_ranks(work, 3)
    assert tables[0] == tables[1] == tables[2]
    assert tables[0] == [
        {"axis": "all", "op": "all_reduce", "group": 3, "calls": 3, "bytes": 33, "most_calls": 1, "most_bytes": 12},
        {"axis": "pp", "op": "send", "group": 3, "calls": 3, "bytes": 300, "most_calls": 2, "most_bytes": 200},
    ]
