"""Run files that people copy must load, be trainable, and say what they are for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.decide.checks import trainable
from shoal.spec import load
from shoal.spec.drivers import driver_of

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TASKS = EXAMPLES / "evaluate"  # task files (tests/evaluate), no run files
RUN_FILES = sorted(path for path in EXAMPLES.rglob("*.yaml") if path.parent != TASKS)


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda p: p.name)
def test_every_example_loads_and_is_trainable(path: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    (weights / "config.json").write_text(json.dumps(config))
    overrides = [f"model.weights={weights}"] if "weights:" in path.read_text() else []
    run = load(path, overrides).run
    trainable(run, driver_of(run) if run.foreign_work else "cut" if run.swarm.stages.count > 1 else None)
    schema = Path(*[".."] * len(path.relative_to(EXAMPLES).parts), "docs/reference/run.schema.json")
    assert (path.parent / schema).is_file()
    assert path.read_text().startswith(f"# yaml-language-server: $schema={schema}\n# ")
