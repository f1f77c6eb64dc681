"""The plan of a run's memory divides as the mesh does, knows torch's schedules, and decides how to recompute."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.memory import BAR, measure

from shoal.plan.memory import MODES, choose_recompute, memory, memory_budget
from shoal.plan.stage_parts import in_flight
from shoal.spec.run import Run
from shoal.spec.shape import shape_of
from tests.plan.runs import closed

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory.py"
FEW = ["tp 2"]  # what it divides is gathered and summed in more ways than what dp_shard does
SMALL = {"dim": 512, "layers": 5, "heads": 8, "kv_heads": 2, "ffn_dim": 1408, "vocab_size": 1024}

MODEL = {"dim": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn_dim": 1536, "vocab_size": 512}
EXPERTS = {**MODEL, "experts": {"count": 8, "top_k": 2, "ffn_dim": 512}}


def planned(model: dict[str, Any] = MODEL, **changes: Any) -> Any:
    run = closed(model, **{"train.batch": 16, "data.seq_len": 256, **changes})
    return memory(run, shape_of(run.model))


@pytest.mark.parametrize("axis", ["dp_shard", "tp", "pp"])
def test_weights_and_optimizer_divide_with_the_axis(axis: str) -> None:
    alone, shared = planned(), planned(**{f"mesh.{axis}": 4})
    assert alone.weights == 4 * shape_of(closed(MODEL).model).params - 4 * 512  # all but the last norm
    assert (shared.weights + shared.optimizer) / (alone.weights + alone.optimizer) == pytest.approx(0.25, rel=0.06)


def test_replicas_save_nothing_but_the_snapshots_that_they_share() -> None:
    copies, alone = planned(**{"mesh.dp_replicate": 4}), planned(**{"train.batch": 2})
    assert copies.total - copies.snapshot >= alone.total - alone.snapshot
    assert 4 * copies.snapshot == alone.snapshot == alone.weights + alone.optimizer
    assert planned(**{"checkpoint.background": False}).snapshot == planned(**{"resources.device": "cuda"}).snapshot == 0
    assert planned(**{"checkpoint.memory": 5, "train.batch": 2}).snapshot == 3 * alone.snapshot


def test_experts_divide_with_ep_and_the_rest_does_not() -> None:
    alone, shared = (planned(EXPERTS, **{"mesh.tp": 4, "mesh.ep": ep}) for ep in (1, 4))
    # Either way a process has a quarter of the experts' numbers; whole experts need not be gathered.
    assert alone.weights == shared.weights
    assert shared.total < alone.total


def test_adamw_keeps_two_numbers_a_parameter_and_muon_one_of_the_blocks() -> None:
    adamw, muon = planned(), planned(**{"train.optimizer": {"name": "muon"}})
    ends = 2 * 4 * 512 * 512
    assert adamw.optimizer == 2 * adamw.weights
    assert muon.optimizer == muon.weights + ends


def test_accumulating_under_fsdp_holds_whole_gradients() -> None:
    once, often = (planned(**{"mesh.dp_shard": 4, "train.batch": batch}) for batch in (8, 16))
    assert often.gradients == planned().weights  # of the whole model, as one process would have them
    assert once.gradients < often.gradients / 2


def test_scattering_with_each_micro_batch_holds_a_share_of_the_gradients() -> None:
    whole, shared = (planned(**{"mesh.dp_shard": 4, "mesh.reduce": way}) for way in ("step", "micro_batch"))
    assert shared.gradients < 0.4 * whole.gradients  # a quarter, and what is not reduced yet
    alone = {"mesh.dp_shard": 4, "train.batch": 8}  # one micro-batch: there is nothing to add up
    assert planned(**alone, **{"mesh.reduce": "micro_batch"}) == planned(**alone)


def test_packed_documents_cost_a_mask_a_block() -> None:
    packed, plain = (planned(**{"data.mask_documents": told}) for told in (True, False))
    per_block = 4 * 2 * 256**2  # float32, two windows
    assert packed.activations - plain.activations == 8 * per_block + 2 * 256**2


def order_of(schedule: str, pp: int, rank: int, micro_batches: int) -> list[Any]:
    """What one process of torch's pipeline does, in its order."""
    from torch.distributed.pipelining import schedules

    if schedule == "zbv":
        made = SimpleNamespace(pp_group_size=pp, _n_microbatches=micro_batches, num_stages=2 * pp)
        return list(schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations(made, rank))  # type: ignore[arg-type]
    rounds = max(1, micro_batches // pp)
    made = SimpleNamespace(
        pp_group_size=pp,
        n_local_stages=2,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // rounds,
        number_of_rounds=rounds,
    )
    return list(schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(made, rank))  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (2, 8), (4, 8), (4, 16)])
def test_micro_batches_in_flight_are_those_of_torchs_schedule(schedule: str, pp: int, micro_batches: int) -> None:
    for rank in range(pp):
        alive: Counter[int] = Counter()
        most = 0
        for action in order_of(schedule, pp, rank, micro_batches):
            kind = "" if action is None else action.computation_type.name
            if kind == "FORWARD":
                alive[action.stage_index] += 1
            elif kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"):  # an input's half keeps what the weights' needs
                alive[action.stage_index] -= 1
            most = max(most, alive.total())
        assert most <= sum(in_flight(schedule, pp, rank, micro_batches)) <= most + 1


def test_as_little_is_recomputed_as_fits() -> None:
    run = closed(MODEL, **{"train.batch": 64, "mesh.micro_batch": 64, "data.seq_len": 256})
    shape = shape_of(run.model)
    needs = [memory(_with(run, mode), shape).total for mode in MODES]
    assert needs[0] > 1.2 * needs[1] > 1.2 * 1.2 * needs[2]
    for mode, need in zip(MODES, needs, strict=True):
        chosen, why = choose_recompute(run, shape, need)
        assert chosen == mode
        assert f"{mode} fits into {need / 1e9:.3g}" in why
    chosen, why = choose_recompute(run, shape, needs[2] // 2)
    assert chosen == "full"
    assert "does not fit" in why
    assert choose_recompute(run, shape, None)[0] == "none"


def _with(run: Run, mode: str) -> Run:
    return run.model_copy(update={"mesh": run.mesh.model_copy(update={"recompute": mode})})


def test_the_budget_of_a_process_is_its_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    one, four = memory_budget("cpu", 1), memory_budget("cpu", 4)
    assert one is not None
    assert four is not None
    assert 0 < four < one / 4
    monkeypatch.setenv("PATH", "")
    assert memory_budget("cuda", 1) is None  # nobody to ask


def test_planning_needs_no_torch() -> None:
    code = "import sys, shoal.plan.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def measured(names: list[str]) -> str:
    """What the benchmark prints, in a process of its own: the heap that other tests have left behind is not a run's."""
    only = [word for name in names for word in ("--only", name)]
    out = subprocess.run([sys.executable, str(BENCHMARK), *only], capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr  # it misses its bar otherwise
    return out.stdout


@pytest.mark.slow
def test_processes_take_the_memory_that_was_planned() -> None:
    """Of a smaller model than the benchmark's, so that what libraries hold weighs more: 5 to 15 MB of 130 to 250."""
    off = {name: round(found.ratio, 3) for name, found in measure(FEW, SMALL) if abs(found.ratio - 1) > BAR}
    assert not off


# What each has of its own: gradients that add up, a schedule. (All: `make bench`.)
KINDS = ["dp_shard 2, accumulating", "pp 2, zbv"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_every_kind_of_mesh() -> None:
    measured(KINDS)
