"""Every `auto` is closed before anything starts, and says why; what cannot be laid out is refused in a sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.errors import SetupError, SpecError
from shoal.spec.run import Run
from shoal.train.decide import decide
from tests.train.tiny import make_data, make_run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("decide") / "data")


def on(run: Run, world: int | None = None) -> Run:
    return decide(run, Path.cwd(), world).run


def test_nothing_is_left_open(data: Path) -> None:
    decided = decide(make_run(data, **{"resources.device": "auto"}), Path.cwd())
    open_still = [key for key, value in _flat(decided.run.model_dump()).items() if value == "auto"]
    # What a function of other fields closes by itself needs no decision.
    assert set(open_still) <= {"model.head_dim", "train.schedule.decay_steps"}
    assert all(d.why for d in decided.decisions)
    assert {"resources.processes", "mesh.micro_batch", "model.vocab_size"} <= {d.key for d in decided.decisions}


def test_what_the_user_says_stays(data: Path) -> None:
    run = make_run(data, **{"mesh.dp_replicate": 2, "mesh.dp_shard": 2, "mesh.micro_batch": 2, "resources.threads": 3})
    decided = decide(run, Path.cwd())
    assert decided.world == 4
    assert (decided.run.mesh, decided.run.resources.threads) == (run.mesh, 3)


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
        ({"train.batch": 10}, 4, "train.batch is 10, which 4 processes cannot share equally: use 8 or 12"),
        ({"mesh.micro_batch": 3}, 2, "mesh.micro_batch is 3, but each of 2 processes has 8 windows a step"),
        ({"mesh.dp_shard": 3}, 2, "there are 2 processes: set resources.processes to 3"),
        ({"model.vocab_size": 64}, 2, "model.vocab_size is 64, but the data's tokenizer has 96 tokens"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(data: Path, changes: dict[str, int], world: int, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        on(make_run(data, **changes), world)


def test_a_model_that_cannot_fit_this_machine_is_refused_before_it_starts(data: Path) -> None:
    with pytest.raises(SetupError, match=r"parameters need at least [\d,]+ GB .* this machine has \d+ GB"):
        on(make_run(data, **{"model.dim": 16384, "model.layers": 126, "model.heads": 128}))


def test_a_gpu_that_is_not_there_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SetupError, match="no GPU is visible here: set it to cpu or auto"):
        on(make_run(data, **{"resources.device": "cuda"}))


def test_deciding_imports_no_torch(data: Path) -> None:
    import subprocess
    import sys

    code = "import sys, shoal.train.decide, shoal.guard.supervise, shoal.cli.train; sys.exit('torch' in sys.modules)"
    assert subprocess.call([sys.executable, "-c", code]) == 0


def _flat(values: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
