"""A class of transformers cut over `mesh.tp` by its own plan: the gradients of one process, or a sentence."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal import checkpoint
from shoal.cli.main import main
from shoal.decide.auto import decide
from shoal.errors import SpecError, Stopped
from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.parallel import class_plan
from shoal.parallel.build import build
from shoal.parallel.place import join
from shoal.spec import dump
from shoal.spec.run import Run
from shoal.train.worker import work
from tests.model.hf_kinds import KINDS, write_config
from tests.model.hf_layouts import Measured, apart, asked, found
from tests.ranks import run_ranks
from tests.train.tiny import losses_of, make_data, steps_of, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")

QUICK = ("gemma3_text", "qwen3_next")  # norms inside heads, a tied table; experts, and layers whose heads are joined
REFUSED = {"mamba2": "0 of 21", "gpt2": "0 of 28", "falcon_h1": "1 of 35", "gpt_oss": "1 of 37"}
REST = tuple(kind for kind in KINDS if kind not in (*QUICK, *REFUSED))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers  # noqa: F401  # once, before ranks are forked

    folder = tmp_path_factory.mktemp("tensor")
    make_data(folder / "data")
    for kind in KINDS:
        write_config(folder / kind, kind)
    return folder


def holds(folder: Path, layout: str, kind: str, kinds: tuple[str, ...], *over: str) -> None:
    alone, shared = found(folder, "1", kinds)[kind], found(folder, layout, kinds, *over)[kind]
    assert isinstance(alone, Measured)
    assert isinstance(shared, Measured), shared
    by = apart(alone, shared)
    assert by.loss < 1e-5
    assert by.norm < 1e-5
    assert by.gradient < 1e-4, by.worst
    assert shared.by_tp.share > 0.5
    ((key, size, why),) = shared.chosen
    assert (key, size) == ("mesh.tp", 2)
    assert f"cuts {shared.by_tp.parameters} of {shared.parameters} parameters" in why


@pytest.mark.parametrize("kind", QUICK)
def test_gradients_of_a_cut_class_are_those_of_one_process(kind: str, folder: Path) -> None:
    holds(folder, "tp 2", kind, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", REST)
def test_so_are_those_of_the_others(kind: str, folder: Path) -> None:
    holds(folder, "tp 2", kind, REST)


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.parametrize("layout", ["tp 2 x dp_shard 2", "tp 2 x dp_replicate 2"])
def test_so_are_those_of_shards_and_copies_of_it(kind: str, layout: str, folder: Path) -> None:
    holds(folder, layout, kind, QUICK, "mesh.recompute=full")


def test_a_plan_that_cuts_too_little_is_refused_with_its_count(folder: Path) -> None:
    for kind, said in found(folder, "tp 2", tuple(REFUSED)).items():
        assert isinstance(said, str)
        assert f"{kind}: its plan for tensor parallelism cuts {REFUSED[kind]} parameters" in said
        assert said.endswith("take dp_shard.")
        assert "\n" not in said


def refusal(run: Run, **styles: class_plan.Style) -> str:
    """What two processes say, where these words of plans mean something else."""

    def rank(rank: int, world: int) -> str:
        kept = dict(class_plan.STYLES)
        class_plan.STYLES.update(styles)
        try:
            build(run, join(run))
        except SpecError as e:
            return str(e)
        finally:
            class_plan.STYLES.clear()
            class_plan.STYLES.update(kept)
        return ""

    first, second = run_ranks(rank, 2)
    assert first == second
    return first


def test_a_gradient_that_its_plan_does_not_sum_is_found(folder: Path) -> None:
    """Losses would not show it: the weights are the same, and AdamW hides a factor."""
    run = decide(asked(folder, "gemma3_text", "any", "mesh.tp=2"), folder, 2).run
    forgotten = replace(class_plan.STYLES["replicated_with_grad_allreduce"], partial=False)
    said = refusal(run, replicated_with_grad_allreduce=forgotten)
    assert "does not learn the same when it is cut over mesh.tp 2 by its own plan: the gradient of net." in said
    assert "_norm.weight has norm" in said
    run = decide(asked(folder, "qwen3_next", "any", "mesh.tp=2"), folder, 2).run
    assert "gradient of" in refusal(run, moe_tp_experts=class_plan.Style("summed out"))
    assert refusal(run, moe_tp_experts=class_plan.Style()).endswith("take dp_shard.")  # nothing is summed


def test_what_cannot_be_cut_so_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    def cut(kind: str, *over: str, **config: Any) -> str:
        write_config(tmp_path / kind, kind, **config)
        return refusal(decide(asked(folder, str(tmp_path / kind), "any", "mesh.tp=2", *over), folder, 2).run)

    assert "its num_key_value_heads 1 cannot be dealt out to mesh.tp 2" in cut("granite", num_key_value_heads=1)
    assert "mlp.gate_proj.weight of [63, 32] cannot be cut into 2 equal parts" in cut("olmo2", intermediate_size=63)
    assert "train.optimizer.moments bf16 is rounded by" in cut("qwen3_next", "train.optimizer.moments=bf16")
    # A table with an odd number of words is left whole, and said to be.
    write_config(tmp_path / "phi3", "phi3", vocab_size=97)
    run = decide(asked(folder, str(tmp_path / "phi3"), "any", "mesh.tp=2"), folder, 2).run
    (why, _) = run_ranks(lambda rank, world: build(run, join(run)).chosen[0][2], 2)
    assert "(model.embed_tokens, lm_head stays whole, as its width does not divide)" in why


def test_an_unknown_word_of_a_plan_is_refused_by_name(folder: Path) -> None:
    run = decide(asked(folder, "granite", "any", "mesh.tp=2"), folder, 2).run

    def rank(rank: int, world: int) -> str:
        kept = class_plan.STYLES.pop("rowwise")
        try:
            build(run, join(run))
        except SpecError as e:
            return str(e)
        finally:
            class_plan.STYLES["rowwise"] = kept
        return ""

    assert "its plan for tensor parallelism says rowwise, which Shoal does not know" in run_ranks(rank, 2)[0]


def train_for(steps: int | None, run: Run, workspace: Path) -> RunDir:
    """From where it was, for so many steps: it is then told to stop, and saves."""
    decided, run_dir = decide(run, workspace, 2).run, RunDir.of(run.name, workspace)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    run_dir.spec_file.write_text(dump(decided))
    attempt = sum(r["kind"] == "start" for r in records(run_dir.journal_file)) if run_dir.journal_file.exists() else 0

    def rank(rank: int, world: int) -> None:
        os.environ["SHOAL_ATTEMPT"] = str(attempt)
        asks = itertools.count()
        with suppress(Stopped):
            work(run_dir, decided, join(decided), lambda: steps is not None and next(asks) >= steps)

    run_ranks(rank, 2)
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUICK)
def test_a_run_goes_on_from_tp_on_shards_and_back(kind: str, folder: Path, tmp_path: Path) -> None:
    """Two stretches of a packed parameter are one matrix in a checkpoint, for whoever reads it."""
    from transformers import AutoModelForCausalLM

    whole = train_on(asked(folder, kind, "whole"), tmp_path, 1)
    name = "moved"
    for steps, mesh in ((1, "mesh.tp=2"), (2, "mesh.dp_shard=2"), (None, "mesh.tp=2")):
        run_dir = train_for(steps, asked(folder, kind, name, mesh), tmp_path)
    assert [step["step"] for step in steps_of(run_dir)] == [1, 2, 3, 4]
    np.testing.assert_allclose(losses_of(run_dir), losses_of(whole), rtol=1e-5)
    norms = [[step["grad_norm"] for step in steps_of(each)] for each in (run_dir, whole)]
    np.testing.assert_allclose(*norms, rtol=1e-5)
    out = tmp_path / "out"
    assert main(["checkpoint", "export", name, str(out), "--tokenizer", "none", "--workspace", str(tmp_path)]) == 0
    saved = checkpoint.newest(run_dir.checkpoints)
    assert saved is not None
    learnt = checkpoint.read_full(saved)
    read = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    assert {f"net.{name}" for name in read} <= learnt.keys()
    assert all(torch.equal(p, learnt[f"net.{name}"]) for name, p in read.items())


@pytest.mark.parametrize("kind", [QUICK[1]])
def test_weights_of_a_folder_are_dealt_out(kind: str, folder: Path, tmp_path: Path) -> None:
    from tests.model.test_hf_any import make_same

    make_same(asked(folder, kind, "start", "seed=5")).save_pretrained(tmp_path / "start")  # type: ignore[operator]
    ends = []
    for name, mesh, world in (("one", "mesh.tp=1", 1), ("two", "mesh.tp=2", 2)):
        run = asked(folder, kind, name, f"model.hf={tmp_path / 'start'}", mesh, "train.steps=1")
        ends.append(losses_of(train_on(run, tmp_path, world)))
    np.testing.assert_allclose(*ends, rtol=1e-6)
