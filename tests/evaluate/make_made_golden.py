"""What lm-eval 0.4.13 asks for the files of made tasks, as digests, and its figures for right answers.

It writes made_golden.json beside this file:

  uv venv ENV && uv pip install --python ENV/bin/python lm-eval==0.4.13
  shoal data tasks arithmetic brackets cloze copy json needle sorting --count 6 --out FOLDER
  ENV/bin/python tests/evaluate/make_made_golden.py FOLDER

Not run by the tests: they need no lm-eval.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent / "made_golden.json"


def main(folder: Path) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    os.chdir(folder)  # lm-eval looks for data files where it is started
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    asked: dict[str, list[list[str]]] = {}

    class Right(LM):
        """Writes the target, and finds short answers likelier."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            for one in requests:
                asked.setdefault(one.task_name, []).append(list(one.args))
            return [(-float(len(one.args[1])), False) for one in requests]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise NotImplementedError

        def generate_until(self, requests: list[Any]) -> list[str]:
            for one in requests:
                asked.setdefault(one.task_name, []).append([one.args[0], one.doc["target"]])
            return [f" {one.doc['target']}" for one in requests]

    names = sorted(path.stem for path in Path(".").glob("*.yaml"))
    manager = TaskManager(include_path=".", include_defaults=False)
    said = lm_eval.simple_evaluate(model=Right(), tasks=names, task_manager=manager, bootstrap_iters=0)
    figures = {
        name: {key: float(value) for key, value in said["results"][name].items() if isinstance(value, float)}
        for name in names
    }
    digests = {name: [digest(pair) for pair in asked[name]] for name in names}
    OUT.write_text(json.dumps({"asked": digests, "figures": figures}, indent=1) + "\n", encoding="utf-8")


def digest(pair: list[str]) -> str:
    return hashlib.sha256(json.dumps(pair).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
