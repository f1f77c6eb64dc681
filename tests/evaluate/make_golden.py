"""Asks lm-eval what it makes of the tasks of tiny.py, and writes golden.json. Not run by the tests: they need no lm-eval.

  uv venv /tmp/lm-eval && uv pip install --python /tmp/lm-eval/bin/python lm-eval==0.4.13 torch transformers accelerate
  /tmp/lm-eval/bin/python tests/evaluate/make_golden.py
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", DISABLE_MULTIPROC="1")
    found = importlib.util.spec_from_file_location("tiny", HERE / "tiny.py")
    assert found is not None and found.loader is not None
    tiny = importlib.util.module_from_spec(found)
    found.loader.exec_module(tiny)
    golden: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["HF_HOME"] = str(folder / "hf")
        import lm_eval
        from lm_eval.tasks import TaskManager

        tiny.write_tasks(folder / "tasks")
        os.chdir(folder / "tasks")
        for begins in (False, True):
            model = folder / f"model-{begins}"
            tiny.write_model(model, begins)
            told = lm_eval.simple_evaluate(
                model="hf",
                model_args={"pretrained": str(model), "dtype": "float32"},
                tasks=list(tiny.TASKS),
                task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
                batch_size=4,
                device="cpu",
                bootstrap_iters=10,
                log_samples=True,
            )
            golden["begins" if begins else "plain"] = {
                name: {"results": results_of(told["results"][name]), "items": items_of(told["samples"][name])}
                for name in tiny.TASKS
            }
        golden["lm_eval"] = lm_eval.__version__
    (HERE / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


def results_of(said: dict[str, object]) -> dict[str, float]:
    """The figures and, of means, their errors."""
    kept = {key: value for key, value in said.items() if isinstance(value, float) and "," in key}
    return {key: value for key, value in kept.items() if math.isfinite(value)}


def items_of(samples: list[dict[str, object]]) -> list[object]:
    """Of each item by its number what the model said, before any filter, and the context of its first question."""
    by_number = {}
    for one in sorted(samples, key=lambda sample: sample["doc_id"]):
        asked = [list(each.values()) for each in one["arguments"].values()] if isinstance(one["arguments"], dict) else [list(a) for a in one["arguments"]]
        by_number[one["doc_id"]] = {"asked": asked, "said": one["resps"]}
    return list(by_number.values())


if __name__ == "__main__":
    sys.exit(main())
