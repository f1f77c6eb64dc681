"""Every `auto` is closed before anything starts, and says why; what cannot be laid out is refused in a sentence."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.decide.auto import Decided, decide
from shoal.decide.torch_installed import impossible_schedules
from shoal.devices import Gpu
from shoal.errors import SetupError, SpecError
from shoal.plan.layouts import layouts
from shoal.plan.memory import memory
from shoal.spec.rules import broken
from shoal.spec.run import Run
from shoal.spec.shape import shape_of
from shoal.spec.start_values import AUTO
from tests.plan.asked import asked
from tests.train.tiny import make_data, make_run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("decide") / "data")


def on(run: Run, world: int | None = None) -> Run:
    return decide(run, Path.cwd(), world).run


def test_nothing_is_left_open(data: Path) -> None:
    decided = decide(make_run(data, **{"resources.device": "auto"}), Path.cwd())
    open_still = [key for key, value in _flat(decided.run.model_dump()).items() if value == "auto"]
    # What a function of other fields closes by itself needs no decision, nor does what has no meaning on this mesh.
    no_meaning = {"mesh.schedule", "mesh.cp_method", "mesh.reduce", "fleet.shards"}
    # Nor can what follows from measurements be decided before there are any.
    measured = {"checkpoint.every", "checkpoint.memory", "checkpoint.read_back", "guard.hang"}
    # For whoever launches it, or trains it with others, to decide.
    open_still = [key for key in open_still if not key.startswith(("launch.", "swarm."))]
    by_itself = {"model.head_dim", "model.init_std", "train.schedule.decay_steps", "train.optimizer.muon_lr"}
    assert set(open_still) <= by_itself | no_meaning | measured
    assert all(d.why for d in decided.decisions)
    assert {"resources.processes", "mesh.micro_batch", "model.vocab_size"} <= {d.key for d in decided.decisions}


def test_the_rule_of_the_start_values_is_chosen_and_written_down(data: Path) -> None:
    decided = decide(make_run(data, **{"model.init": "auto"}), Path.cwd(), 1)
    (choice,) = (d for d in decided.decisions if d.key == "model.init")
    assert choice.value == decided.run.model.init == shape_of(decided.run.model).init == AUTO["llama"]["adamw"]
    again = decide(decided.run, Path.cwd(), 1)
    assert (again.run.model.init, "model.init" in {d.key for d in again.decisions}) == (choice.value, False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model.ffn_dim": 1000}, "model.ffn_dim is 1000: make it 992, or take bf16"),
        ({"data.seq_len": 31, "mesh.micro_batch": 1}, "is 31: make it 32"),
        ({"mesh.tp": 2, "resources.processes": 2}, "take bf16, or tp 1"),
    ],
)
def test_what_8_bits_cannot_compute_is_refused_before_anything_starts(
    data: Path, change: dict[str, object], says: str
) -> None:
    with pytest.raises(SpecError) as refused:
        decide(make_run(data, **{"train.precision": "fp8", **change}), Path.cwd())
    assert says in str(refused.value)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_blocks_are_compiled_on_a_gpu_but_for_a_schedule_that_halves_them(data: Path, schedule: str) -> None:
    changes = {"resources.device": "cuda", "mesh.pp": 2, "mesh.schedule": schedule, "model.layers": 4}
    run = decide(make_run(data, **changes), Path.cwd(), world=2).run
    assert run.train.compile is (schedule != "zbv")
    assert run.train.kernels == "triton"


def test_what_the_user_says_stays(data: Path) -> None:
    said = {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "micro_batch": 2, "recompute": "full"}
    run = make_run(data, **{f"mesh.{key}": value for key, value in said.items()}, **{"resources.threads": 3})
    decided = decide(run, Path.cwd())
    assert decided.world == 8
    assert {key: getattr(decided.run.mesh, key) for key in said} == said
    assert decided.run.resources.threads == 3
    assert not {f"mesh.{key}" for key in said} & {d.key for d in decided.decisions}


def test_all_cores_are_used_as_far_as_the_batch_divides(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert on(make_run(data, **{"train.batch": 16})).resources.processes == 4
    assert on(make_run(data, **{"train.batch": 12})).resources.processes == 6
    assert on(make_run(data, **{"train.batch": 7})).resources.processes == 1


def test_a_small_model_is_replicated_and_a_large_one_sharded(data: Path) -> None:
    assert (on(make_run(data), 4).mesh.dp_replicate, on(make_run(data), 4).mesh.dp_shard) == (4, 1)
    large = make_run(data, **{"model.dim": 4096, "model.layers": 32, "model.heads": 32})
    assert (on(large, 4).mesh.dp_replicate, on(large, 4).mesh.dp_shard) == (1, 4)
    assert on(make_run(data, **{"mesh.dp_shard": 2}), 4).mesh.dp_replicate == 2


@pytest.mark.parametrize(
    ("changes", "world", "says"),
    [
        ({"train.batch": 10}, 4, "10 cannot be split over 4 processes; train.batch 8 would do, and the nearest mesh"),
        ({"mesh.micro_batch": 3}, 2, "2 processes x mesh.micro_batch 3; .* is dp_replicate 2 with micro_batch 4"),
        ({"mesh.dp_shard": 3}, 2, "WORLD_SIZE 2 is not a multiple of mesh.dp_shard 3.*works is dp_shard 2"),
        ({"mesh.tp": 4}, 4, r"kv_heads 2 cannot be split over mesh.tp 4; .* works is dp_replicate 2 x tp 2\.$"),
        ({"mesh.pp": 4}, 4, r"layers 2 are fewer than the 4 stages .* works is pp 2 x dp_replicate 2\.$"),
        (
            {"mesh.reduce": "micro_batch"},
            2,
            r"is for FSDP without a pipeline .* leave it out, or raise mesh.dp_shard\.$",
        ),
        ({"mesh.reduce": "micro_batch", "mesh.pp": 2}, 2, "is for FSDP without a pipeline"),
        ({"model.vocab_size": 64}, 2, "model.vocab_size is 64, but the data's tokenizer has 96 tokens"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(data: Path, changes: dict[str, int], world: int, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        on(make_run(data, **changes), world)


def test_data_parallelism_takes_what_the_other_axes_leave(data: Path) -> None:
    mesh = on(make_run(data, **{"mesh.tp": 2, "mesh.pp": 2}), 8).mesh
    assert (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, mesh.ep) == (2, 2, 1, 1, 2, 1)


def test_the_mesh_says_how_many_processes_there_are(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert decide(make_run(data, **{"mesh.tp": 2}), Path.cwd()).world == 4  # not 6: three cannot share a batch of 16
    assert decide(make_run(data, **{"mesh.tp": 2, "mesh.cp": 2, "mesh.pp": 2}), Path.cwd()).world == 8
    every = {"mesh.tp": 2, "mesh.cp": 1, "mesh.pp": 1, "mesh.dp_shard": 1, "mesh.dp_replicate": 1}
    assert decide(make_run(data, **every), Path.cwd()).world == 2


def test_an_open_axis_takes_the_processes_that_nothing_else_may_take(data: Path) -> None:
    decided = decide(make_run(data, **{"mesh.dp_replicate": 1, "mesh.dp_shard": 2}), Path.cwd(), 4)
    assert decided.run.mesh.tp == 2
    assert why(decided, "mesh.tp") == "the other axes leave 2 of 4 processes"


@pytest.mark.parametrize(
    ("changes", "schedule", "micro_batch"),
    [
        ({}, "1f1b", 2),  # 16 windows: 8 micro-batches are 4 a stage
        ({"train.batch": 4}, "1f1b", 1),
        ({"train.batch": 1}, "gpipe", 1),
        ({"mesh.micro_batch": 16}, "gpipe", 16),
        ({"mesh.schedule": "gpipe"}, "gpipe", 2),
        ({"mesh.schedule": "zbv", "model.layers": 4}, "zbv", 2),
        ({"mesh.schedule": "interleaved", "model.layers": 4, "train.batch": 6}, "interleaved", 1),
    ],
)
def test_a_pipeline_gets_a_schedule_and_micro_batches_that_fill_it(
    data: Path, changes: dict[str, object], schedule: str, micro_batch: int
) -> None:
    mesh = on(make_run(data, **{"mesh.pp": 2, **changes}), 2).mesh
    assert (mesh.schedule, mesh.micro_batch) == (schedule, micro_batch)


def test_heads_decide_how_a_shared_sequence_is_attended_to(data: Path) -> None:
    assert on(make_run(data, **{"mesh.cp": 2}), 2).mesh.cp_method == "all_to_all"
    assert on(make_run(data, **{"mesh.cp": 4}), 4).mesh.cp_method == "ring"  # 2 kv_heads
    assert on(make_run(data, **{"mesh.cp": 2, "mesh.tp": 2}), 4).mesh.cp_method == "ring"  # 1 of them is left


@pytest.mark.parametrize(
    ("mesh", "world", "ep", "dp_shard"),
    [
        ({"dp_shard": 4}, 4, 4, 4),
        ({"dp_shard": 4, "tp": 2}, 8, 8, 4),
        ({"dp_shard": 2, "cp": 2, "tp": 2}, 16, 8, 2),
        ({"dp_shard": 16}, 16, 8, 16),  # 8 experts: no more than one each
        ({}, 4, 1, 1),  # copies: nobody to share with
        ({"ep": 4}, 8, 4, 4),  # asked for, so a copy is shared by four
    ],
)
def test_experts_are_shared_as_widely_as_they_divide(
    data: Path, mesh: dict[str, int], world: int, ep: int, dp_shard: int
) -> None:
    experts = {"count": 8, "top_k": 2, "ffn_dim": 64}
    decided = decide(make_run(data, **{"model.experts": experts}, **_mesh(mesh)), Path.cwd(), world)
    assert (decided.run.mesh.ep, decided.run.mesh.dp_shard) == (ep, dp_shard)
    if "ep" not in mesh:
        assert "8 experts and dp_shard x cp x tp" in why(decided, "mesh.ep")


def test_axes_of_one_process_are_not_worth_a_word(data: Path) -> None:
    said = {d.key for d in decide(make_run(data), Path.cwd(), 1).decisions}
    assert not said & {f"mesh.{name}" for name in ("pp", "cp", "tp", "ep", "schedule", "cp_method")}


def test_what_was_decided_is_decided_the_same_when_a_run_goes_on(data: Path) -> None:
    for changes, world in (({}, 2), ({"mesh.pp": 2, "mesh.tp": 2}, 8), ({"mesh.cp": 4}, 4)):
        first = decide(make_run(data, **changes), Path.cwd(), world)
        again = decide(first.run, Path.cwd(), world)
        assert again.run == first.run
        assert again.decisions == ()
        assert broken(first.run) == []


def test_recompute_is_as_little_as_the_memory_allows(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert on(make_run(data)).mesh.recompute == "none"
    monkeypatch.setattr("shoal.plan.memory.memory_budget", lambda device, processes: 1)
    decided = decide(make_run(data), Path.cwd())
    assert decided.run.mesh.recompute == "full"
    assert "does not fit" in why(decided, "mesh.recompute")


def test_gradients_are_scattered_at_once_only_where_whole_ones_do_not_fit(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(data, **{"mesh.dp_shard": 2, "mesh.micro_batch": 1})
    roomy = decide(run, Path.cwd(), 2)
    assert roomy.run.mesh.reduce == "step"
    assert "mesh.reduce" not in {d.key for d in roomy.decisions}
    whole, shared = (
        memory(_set(roomy.run, reduce=way, recompute="full"), shape_of(roomy.run.model)).total
        for way in ("step", "micro_batch")
    )
    monkeypatch.setattr("shoal.plan.memory.memory_budget", lambda device, processes: (whole + shared) // 2)
    tight = decide(run, Path.cwd(), 2)
    assert tight.run.mesh.reduce == "micro_batch"
    assert "predicted GB a process: step" in why(tight, "mesh.reduce")
    assert on(_set(run, reduce="step"), 2).mesh.reduce == "step"  # what the user says stays


def _set(run: Run, **mesh: str) -> Run:
    return run.model_copy(update={"mesh": run.mesh.model_copy(update=mesh)})


def test_more_processes_than_gpus_are_refused_with_a_mesh_for_those_there_are(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.devices.visible_gpus", lambda: 4)
    run = make_run(data, **{"resources.device": "cuda", "mesh.dp_shard": 4, "mesh.dp_replicate": 1, "mesh.tp": 2})
    with pytest.raises(SetupError, match=r"8 processes need a GPU each, and 4 are visible .* is dp_shard 2 x tp 2\."):
        on(run)


def test_with_the_tests_setting_processes_share_gpus_and_their_memory(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.devices.visible_gpus", lambda: 1)
    monkeypatch.setattr("shoal.plan.memory._gpu_bytes", lambda: [8 << 30])
    monkeypatch.setenv("SHOAL_TEST_SHARE_GPU", "1")
    run = make_run(data, **{"resources.device": "cuda", "mesh.dp_shard": 4, "mesh.dp_replicate": 1, "mesh.tp": 2})
    decided = decide(run, Path.cwd())
    assert decided.world == 8
    assert "into 0.966" in why(decided, "mesh.recompute"), "90% of an eighth of 8 GiB"


def test_a_schedule_that_the_installed_torch_cannot_do_is_refused_and_never_chosen(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zbv = {"model.layers": 4, "mesh.pp": 2, "mesh.schedule": "zbv", "mesh.micro_batch": 1}
    assert on(make_run(data, **zbv), 2).mesh.schedule == "zbv"
    for version, able in (("2.11.0+cu128", False), ("2.12.1", False), ("2.13.0", True), ("3.0", True), ("", True)):
        monkeypatch.setattr("shoal.decide.torch_installed.installed", lambda version=version: version)
        assert impossible_schedules() == (() if able else ("zbv",))
    monkeypatch.setattr("shoal.decide.torch_installed.installed", lambda: "2.11.0+cu128")
    with pytest.raises(SetupError, match=r"schedule zbv needs torch 2\.13 or later, and 2\.11\.0\+cu128 is installed"):
        on(make_run(data, **zbv), 2)
    question = asked("llama3-8b", 64, 512, pp=4)
    assert {one.schedule for one in layouts(replace(question, without=impossible_schedules()))} == {
        "1f1b",
        "interleaved",
    }


def test_a_model_that_cannot_fit_this_machine_is_refused_before_it_starts(data: Path) -> None:
    with pytest.raises(SetupError, match=r"parameters need at least [\d,]+ GB .* this machine has \d+ GB"):
        on(make_run(data, **{"model.dim": 16384, "model.layers": 126, "model.heads": 128}))


def test_a_run_that_no_gpu_here_holds_is_refused_with_the_plans_numbers(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.devices.visible_gpus", lambda: 2)
    model = {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn_dim": 14336, "vocab_size": 128256}
    mesh = {"mesh.dp_shard": 2, "mesh.dp_replicate": 1, "mesh.micro_batch": 1, "resources.device": "cuda"}
    run = make_run(data, **{f"model.{name}": value for name, value in model.items()}, **mesh)
    says = (
        r"this needs [\d.]+ GB of each GPU at the .* \(weights 16\.1, optimizer 32\.1, .*\), and there are 40 GB: raise"
    )
    for gb, recompute in ((40, "auto"), (40, "full")):
        monkeypatch.setattr("shoal.plan.memory._gpu_bytes", lambda gb=gb: [int(gb * 1e9)])
        with pytest.raises(SetupError, match=says):
            on(run.model_copy(update={"mesh": run.mesh.model_copy(update={"recompute": recompute})}))
    for sizes in ([int(141e9)] * 2, []):  # it fits; nobody can be asked
        monkeypatch.setattr("shoal.plan.memory._gpu_bytes", lambda sizes=sizes: sizes)
        assert on(run).mesh.dp_shard == 2
    # Too many windows at once, chosen by rule on a card that nobody has described, may become fewer after a start.
    monkeypatch.setattr("shoal.plan.memory._gpu_bytes", lambda: [int(90e9)] * 2)
    long = run.model_copy(update={"mesh": run.mesh.model_copy(update={"micro_batch": "auto", "recompute": "none"})})
    assert on(long.model_copy(update={"data": run.data.model_copy(update={"seq_len": 1024})})).mesh.micro_batch > 1


def test_a_gpu_that_is_not_there_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SetupError, match="no GPU is visible here: set it to cpu or auto"):
        on(make_run(data, **{"resources.device": "cuda"}))


def test_deciding_imports_no_torch(data: Path) -> None:
    import subprocess
    import sys

    code = "import sys, shoal.decide.auto, shoal.guard.supervise, shoal.cli.train; sys.exit('torch' in sys.modules)"
    assert subprocess.call([sys.executable, "-c", code]) == 0


def test_copies_that_do_not_fit_are_told_from_a_model_that_does_not(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 250}[name])  # 1 MB
    monkeypatch.setattr("shoal.plan.memory.memory_budget", lambda device, processes: None)
    with pytest.raises(SetupError, match=r"optimizer in 4 copies, .*: set mesh.dp_replicate to 1\."):
        on(make_run(data), 4)
    for name in ("dp_shard", "tp", "pp"):
        on(make_run(data, **{f"mesh.{name}": 2}), 2)


def why(decided: Decided, key: str) -> str:
    return next(d.why for d in decided.decisions if d.key == key)


def _mesh(sizes: dict[str, int]) -> dict[str, int]:
    return {f"mesh.{name}": size for name, size in sizes.items()}


def _flat(values: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def test_several_gpus_are_laid_out_by_the_planner(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.devices.visible_gpus", lambda: 8)
    monkeypatch.setattr("shoal.plan.expect.this_device", lambda: "NVIDIA H100 80GB HBM3")
    llama = {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn_dim": 14336, "vocab_size": 128256}
    large = {f"model.{name}": value for name, value in llama.items()}
    changes = {**large, "resources.device": "cuda", "data.seq_len": 256, "train.batch": 64}
    decided = decide(make_run(data, **changes), data.parent)
    assert decided.world == 8
    mesh = decided.run.mesh
    assert mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.cp * mesh.tp == 8
    assert mesh.dp_replicate < 8, "16 bytes a parameter do not fit one GPU"
    whys = {d.key: d.why for d in decided.decisions}
    assert "the fastest of all layouts on 8 H100 SXM as predicted" in "".join(whys.values())
    named = decide(make_run(data, **{**changes, "mesh.tp": 2}), data.parent)
    assert named.run.mesh.tp == 2


def test_windows_at_once_fill_a_card_as_far_as_speed_and_memory_ask(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No limit of 16,384 tokens: on a card with room for more it takes more, on a small one less, and never all."""
    monkeypatch.setattr("shoal.devices.visible_gpus", lambda: 1)
    monkeypatch.setattr("shoal.plan.expect.this_device", lambda: "NVIDIA H200")
    model = {"dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn_dim": 2048}
    changes = {**{f"model.{name}": value for name, value in model.items()}, "train.batch": 1024, "data.seq_len": 128}
    run = make_run(data, **{**changes, "resources.device": "cuda"})
    found = {}
    for gb in (141, 8):
        monkeypatch.setattr("shoal.plan.memory._gpu_bytes", lambda gb=gb: [int(gb * 1e9)])
        decided = decide(run, data.parent)
        assert decided.run.train.batch == 1024
        assert decided.world == 1
        taken, may = re.findall(r"take ([\d.]+) of the ([\d.]+) GB", why(decided, "mesh.micro_batch"))[0]
        assert float(taken) < float(may) == pytest.approx(0.9 * gb, rel=0.01)
        found[gb] = int(decided.run.mesh.micro_batch)
    assert found[141] * 128 > 16_384
    assert found[8] < found[141]
    said = make_run(data, **{**changes, "resources.device": "cuda", "mesh.micro_batch": 8})
    assert decide(said, data.parent).run.mesh.micro_batch == 8


def test_a_card_that_nobody_has_described_is_filled_by_rule(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.devices.visible_gpus", lambda: 1)
    monkeypatch.setattr("shoal.plan.expect.this_device", lambda: "Some Accelerator 9000")
    decided = decide(make_run(data, **{"resources.device": "cuda", "train.batch": 1024}), data.parent)
    assert int(decided.run.mesh.micro_batch) * 32 == 16_384


@pytest.fixture
def of_amd(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two MI300X, and a torch that was built for them."""
    card = Gpu("amd", "AMD Instinct MI300X", 206_141_652_992, "0000:05:00.0", "gfx942")
    monkeypatch.setattr("shoal.devices.visible_gpus", lambda: 2)
    monkeypatch.setattr("shoal.decide.device.vendor", lambda: "amd")
    monkeypatch.setattr("shoal.devices.torch_build.build", lambda: "rocm")
    monkeypatch.setattr("shoal.devices.torch_build.version", lambda: "2.13.0+rocm7.1")
    for place in ("shoal.devices", "shoal.plan.memory", "shoal.plan.expect"):
        monkeypatch.setattr(f"{place}.gpus", lambda: (card, card))
    return monkeypatch


def test_gpus_of_amd_are_used_as_cuda_with_torchs_own_kernels(data: Path, of_amd: pytest.MonkeyPatch) -> None:
    decided = decide(make_run(data, **{"resources.device": "auto"}), Path.cwd())
    assert (decided.run.resources.device, decided.run.resources.processes) == ("cuda", 2)
    assert decided.run.train.kernels == "plain"
    assert "never tried" in why(decided, "train.kernels")
    assert any("2 MI300X" in decision.why for decision in decided.decisions), "the planner knows it"


def test_what_shoal_cannot_do_on_amd_is_refused_before_the_start(data: Path, of_amd: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match=r"AMD Instinct MI300X \(gfx942\) does not multiply those .* take bf16\."):
        on(make_run(data, **{"resources.device": "auto", "train.precision": "fp8", "mesh.micro_batch": 1}))
    with pytest.raises(SetupError, match=r"written and measured for NVIDIA's GPUs, .* take plain or auto\."):
        on(make_run(data, **{"resources.device": "auto", "train.kernels": "triton"}))


def test_our_own_kernels_are_refused_on_a_processor(data: Path) -> None:
    with pytest.raises(SetupError, match=r"triton is for GPUs, and this run computes on the processor.* take plain"):
        on(make_run(data, **{"train.kernels": "triton"}))


def test_a_torch_for_other_gpus_is_told_before_the_start(data: Path, of_amd: pytest.MonkeyPatch) -> None:
    of_amd.setattr("shoal.devices.torch_build.build", lambda: "cuda")
    of_amd.setattr("shoal.devices.torch_build.version", lambda: "2.13.0+cu130")
    says = r"GPUs visible: 2 of AMD, and torch 2\.13\.0\+cu130 was built without ROCm"
    with pytest.raises(SetupError, match=says + r": install the one for ROCm, or set resources\.device to cpu\."):
        on(make_run(data, **{"resources.device": "cuda"}))
    decided = decide(make_run(data, **{"resources.device": "auto"}), Path.cwd())
    assert decided.run.resources.device == "cpu", "an AMD processor's own small GPU stops nobody"
    assert re.search(says, why(decided, "resources.device"))
    of_amd.setattr("shoal.decide.device.vendor", lambda: "nvidia")
    of_amd.setattr("shoal.devices.torch_build.build", lambda: "cpu")
    with pytest.raises(SetupError, match=r"2 of NVIDIA, and torch .* was built without CUDA"):
        on(make_run(data, **{"resources.device": "auto"}))
