"""Asks lm-eval what it makes of the tasks of tiny.py, and writes golden.json. The tests do not: they need no lm-eval.

uv venv .cache/lm-eval; uv pip install -p .cache/lm-eval lm-eval==0.4.13 torch transformers accelerate
.cache/lm-eval/bin/python tests/evaluate/make_golden.py
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

Told = dict[str, Any]
HERE = Path(__file__).resolve().parent


def main() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", DISABLE_MULTIPROC="1")
    found = importlib.util.spec_from_file_location("tiny", HERE / "tiny.py")
    assert found is not None
    assert found.loader is not None
    tiny = importlib.util.module_from_spec(found)
    found.loader.exec_module(tiny)
    golden: Told = {}
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
    (HERE / "golden.json").write_text(compact(golden))


def compact(golden: Told) -> str:
    """An item a line."""
    text = json.dumps(golden, indent=1)
    return (
        re.sub(r"\[\n {5}(?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*\n {4}\]", lambda m: " ".join(m[0].split()), text)
        + "\n"
    )


def results_of(said: Told) -> dict[str, float]:
    """The figures and, of means, their errors."""
    kept = {key: value for key, value in said.items() if isinstance(value, float) and "," in key}
    return {key: value for key, value in kept.items() if math.isfinite(value)}


def items_of(samples: list[Told]) -> list[list[Any]]:
    """Of each item by its number: a digest of the texts that were asked, and what the model said before any filter."""
    by_number = {one["doc_id"]: one for one in samples}  # a task with several filters tells each item several times
    ordered = [by_number[number] for number in sorted(by_number)]
    return [
        [digest([[str(text) for text in texts(asked)] for asked in asks(one)]), said(one["resps"])] for one in ordered
    ]


def asks(sample: Told) -> list[Any]:
    told = sample["arguments"]
    return list(told.values()) if isinstance(told, dict) else list(told)


def texts(asked: Any) -> list[str]:
    """A context and what follows it; not how an answer is to be written."""
    parts = asked.values() if isinstance(asked, dict) else asked
    return [part for part in parts if isinstance(part, str)]


def digest(asked: list[list[str]]) -> str:
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]


def said(resps: list[list[Any]]) -> list[Any]:
    """[log-likelihood, likeliest] of each, or a text, or a log-likelihood."""
    answers = [one[0] for one in resps]
    return [[round(one[0], 6), one[1]] if isinstance(one, list | tuple) else one for one in answers]


if __name__ == "__main__":
    main()
