"""What must hold of the tasks and samples of a run (`eval.tasks`, `eval.samples`)."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.near import closest
from shoal.spec.base import TASK_FILES
from shoal.spec.mesh.rules import Broken
from shoal.spec.run import Eval, Run

# Those of `shoal.evaluate.generated.catalogue`, which stands above: a test compares.
MADE_TASKS = (
    *("arithmetic", "brackets", "cloze", "copy", "json", "needle", "needle-4k", "needle-16k", "needle-64k", "sorting"),
)
MOST_TASKS = 100
MOST_SAMPLES = 100


def asked_rules(run: Run) -> Iterator[Broken]:
    asked = run.eval
    if asked.limit is not None and not asked.tasks:
        yield ("eval.limit", "eval.tasks"), f"eval.limit {asked.limit} is about tasks; name them in eval.tasks"
    if asked.sample_tokens != Eval.model_fields["sample_tokens"].default and not asked.samples:
        yield (
            ("eval.sample_tokens", "eval.samples"),
            f"eval.sample_tokens {asked.sample_tokens} is about samples; give their beginnings in eval.samples",
        )
    for name in asked.tasks:
        if name not in MADE_TASKS and not name.endswith(TASK_FILES):
            near = closest(name, MADE_TASKS)
            hint = f"did you mean {near}?" if near else f"made tasks are {', '.join(MADE_TASKS)}"
            yield ("eval.tasks",), f"eval.tasks names '{name}', which is no made task and no task file (.yaml); {hint}"
    for name, most in (("tasks", MOST_TASKS), ("samples", MOST_SAMPLES)):
        said = getattr(asked, name)
        if len(said) > most or len(set(said)) < len(said):
            yield (f"eval.{name}",), f"eval.{name} has {len(said)} entries; name each once, and {most} at most"
    if run.engine.name == "deepspeed" and (asked.tasks or asked.samples):
        yield (
            ("eval.tasks" if asked.tasks else "eval.samples", "engine.name"),
            "DeepSpeed does not hand out the whole model while it trains; ask its checkpoints with `shoal eval`, or "
            "set engine.name to native",
        )
    if run.own.data is not None and (asked.tasks or asked.samples):
        yield (
            ("eval.tasks" if asked.tasks else "eval.samples", "own.data"),
            f"own.data {run.own.data} gives no tokenizer to read tasks and samples with; leave them out",
        )
