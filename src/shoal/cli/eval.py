"""Measure a model on tasks, with intervals.

  shoal eval RUN --tasks arithmetic,copy                    made tasks, which need no data
  shoal eval FOLDER --tasks quiz.yaml --against OTHER       a task file of lm-eval; which of two models is better
  shoal eval RUN --tasks quiz.yaml --step every             each checkpoint; the figures become curves of the run
  shoal eval http://HOST:PORT --model NAME --tokenizer FOLDER --tasks quiz.yaml
  shoal eval lm-eval FOLDER -- --tasks arc_easy --limit 10  lm-eval itself, with Shoal's engine as its model

`shoal data tasks` lists the made tasks, and writes them as task files. Every finished question is kept: started again,
an evaluation goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.opening import add_key, is_folder, key_of
from shoal.cli.options import add_workspace, no_script
from shoal.errors import UsageError
from shoal.journal.rundir import RunDir, find_run, workspace

if TYPE_CHECKING:
    from shoal.evaluate.ask import Asking, Figure
    from shoal.evaluate.compare import Paired
    from shoal.evaluate.contamination import Contamination
    from shoal.evaluate.model import Model
    from shoal.evaluate.questions import Chat
    from shoal.evaluate.task import Task

EVERY = "every"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN|FOLDER|URL", help="a run, a Hugging Face folder, or an endpoint")
    parser.add_argument("more", nargs="*", metavar="…", help=argparse.SUPPRESS)
    asked = parser.add_argument_group("what is asked")
    asked.add_argument("--tasks", metavar="TASK,…", help="task files (YAML), and made tasks by name")
    asked.add_argument("--against", metavar="OTHER", help="a run, folder or endpoint to compare with, item by item")
    asked.add_argument("--limit", type=int, metavar="N", help="the first N items of each task")
    asked.add_argument("--few-shot", type=int, metavar="N", help="another number of examples than the tasks'")
    asked.add_argument(
        "--template",
        nargs="?",
        const="default",
        metavar="NAME",
        help="put questions into the folder's chat template; it is part of the figure's name",
    )
    asked.add_argument(
        "--contamination", metavar="DATA,…", help="which items stand in this data (folders of `shoal data prepare`)"
    )
    asked.add_argument("--seed", type=int, default=0, metavar="S", help="of made tasks (default: 0)")
    asked.add_argument("--count", type=int, metavar="N", help="items of each made task")
    how = parser.add_argument_group("how")
    how.add_argument("--step", metavar="N|every", help="the checkpoint of this step, or each one (default: the newest)")
    how.add_argument("--batch", type=int, default=16, metavar="N", help="answers written at a time (default: 16)")
    how.add_argument(
        "--exact", action="store_true", help="bits of train.kernels exact, whatever is computed beside; slower"
    )
    how.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: a GPU if there is one")
    how.add_argument("--tokenizer", metavar="PATH", help="another than that of the run's data; of an endpoint, its own")
    how.add_argument("--start", metavar="TOKEN", help="another start token than the data's or the folder's; or none")
    how.add_argument("--model", dest="served", metavar="NAME", help="of an endpoint: which of its models")
    how.add_argument("--context", type=int, metavar="N", help="of an endpoint: tokens that its model sees")
    add_key(how)
    how.add_argument("--own-code", action="store_true", help="run the code of a model with blocks of its own")
    how.add_argument("--out", metavar="FOLDER", help="where answers are kept (default: of a run, with the run)")
    how.add_argument("--json", action="store_true", help="machine-readable output")
    add_workspace(parser)


@dataclass(frozen=True)
class Side:
    """One of the models, before it is opened."""

    said: str
    run: RunDir | None = None
    url: str | None = None


def run(args: argparse.Namespace) -> int:
    if args.model == "lm-eval":
        return _lm_eval(args)
    if args.more:
        raise UsageError(f"'{args.more[0]}' is one word too many; several tasks are written --tasks A,B.")
    if not args.tasks:
        raise UsageError(
            "say what to ask: --tasks FILE.yaml, or the name of a made task (`shoal data tasks` lists them)."
        )
    for name, least in (("limit", 1), ("few_shot", 0), ("batch", 1), ("count", 1), ("seed", 0), ("context", 2)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} is {value}, but {least} is the least it can be.")
    sides = [_side(said, args) for said in (args.model, args.against) if said is not None]
    if all(side.url is None for side in sides):
        for option, given in (("--model", args.served), ("--context", args.context), ("--key-from", args.key_from)):
            if given is not None:
                raise UsageError(f"{option} is for a URL, and none is asked; leave it out.")
    steps = _steps(args, sides[0])

    from shoal.evaluate.ask import GROUP, Asking

    tasks = [_task(name, args) for name in _names(args.tasks)]
    group = max(GROUP, 2 * args.batch)
    first: list[Figure] = []
    for side in sides:
        _answers_that(side, tasks, args)
    for step in steps:
        model = _model(sides[0], step, args)
        first += _evaluated(tasks, model, sides[0], Asking(args.limit, group), args)
    seen = None if args.contamination is None else _contamination(tasks, args)
    if len(sides) == 1:
        _print(first, [], seen, args)
        return 0
    other = _evaluated(tasks, _model(sides[1], None, args), sides[1], Asking(args.limit, group), args)
    _print([*first, *other], _compared(first, other), seen, args)
    return 0


def _side(said: str, args: argparse.Namespace) -> Side:
    """Looked at before torch is loaded: a typing mistake is answered at once."""
    if "://" in said:
        from shoal.evaluate.endpoint import checked

        return Side(said, url=checked(said))
    if is_folder(said):
        return Side(said)
    found = find_run(said, workspace(args.workspace))
    no_script(found)
    return Side(said, run=found)


def _steps(args: argparse.Namespace, side: Side) -> list[int | None]:
    if args.step is None:
        return [None]
    if side.run is None:
        raise UsageError(f"--step names checkpoints of a run, but {side.said} is none.")
    if args.step != EVERY:
        if not args.step.isdecimal():
            raise UsageError(f"--step is '{args.step}'; give the number of a step, or '{EVERY}'.")
        return [int(args.step)]
    if args.against is not None:
        raise UsageError("--step every and --against do not go together: compare one step.")
    from shoal.checkpoint import published

    steps = sorted({one.name.step for one in published(side.run.checkpoints) if one.on_history})
    if not steps:
        raise UsageError(f"run '{side.run.name}' has no checkpoint yet; `shoal checkpoint ls` lists them.")
    return list(steps)


def _answers_that(side: Side, tasks: Sequence[Task], args: argparse.Namespace) -> None:
    """Refused before anything is asked or written."""
    from shoal.evaluate.task import GENERATE

    judged = [task.name for task in tasks if task.kind != GENERATE]
    if side.url is not None and judged and args.tokenizer is None:
        raise UsageError(
            f"task {judged[0]} needs log-likelihoods, which an endpoint is asked for in tokens: name its model's "
            "tokenizer with --tokenizer FOLDER."
        )


def _names(said: str) -> list[str]:
    names = [name.strip() for name in said.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise UsageError(f"--tasks is '{said}'; name each task once, with commas between.")
    return names


def _task(name: str, args: argparse.Namespace) -> Task:
    from shoal.evaluate.generated.catalogue import named
    from shoal.evaluate.task_file import load_task, task_of

    if name.endswith((".yaml", ".yml")) or os.sep in name:
        return load_task(Path(name), args.few_shot)
    made = named(name, args.seed, args.count)
    keys = {**made.keys, "test_split": "test"}
    return task_of(keys, {"test": list(made.items), "train": list(made.examples)}, f"task {name}", args.few_shot)


def _model(side: Side, step: int | None, args: argparse.Namespace) -> Model:
    from shoal.evaluate.model import Local
    from shoal.generate.opened import Wanted, of_folder, of_run

    if side.url is not None:
        return _endpoint(side.url, args)
    wanted = Wanted(args.device, step, args.tokenizer, args.start, True, args.own_code)
    opened = of_folder(Path(side.said), wanted) if side.run is None else of_run(side.run, wanted)
    return Local(opened, args.batch, args.exact)


def _endpoint(url: str, args: argparse.Namespace) -> Model:
    from shoal.data.tokenizer import load_tokenizer
    from shoal.evaluate.endpoint import USUAL_CONTEXT, Endpoint
    from shoal.evaluate.tokens import Encoder

    if args.served is None:
        raise UsageError(f"say which of its models {url} should answer with: --model NAME.")
    if args.exact:
        raise UsageError("--exact is a way of computing here; an endpoint computes as it does.")
    encoder = None
    if args.tokenizer is not None:
        tokenizer = load_tokenizer(args.tokenizer, start=args.start, special=True)
        encoder = Encoder(tokenizer, args.context or USUAL_CONTEXT, bool(getattr(tokenizer, "template", ())))
    return Endpoint(url, args.served, encoder, key_of(args))


def _evaluated(
    tasks: Sequence[Task], model: Model, side: Side, asking: Asking, args: argparse.Namespace
) -> list[Figure]:
    from dataclasses import replace

    from shoal.data.progress_line import ProgressLine
    from shoal.evaluate.ask import evaluated
    from shoal.evaluate.record import journaled

    if args.template is not None:
        chat, how = _chat(model, args.template)
        asking = replace(asking, chat=chat, asked=how)
    found: list[Figure] = []
    for task in tasks:
        total = len(task.items) if asking.limit is None else min(asking.limit, len(task.items))
        line = ProgressLine(f"{model.name} {task.name}", total, quiet=args.json)
        found += evaluated(task, model, _folder(side, args), asking, line.add)
    step = getattr(getattr(model, "opened", None), "step", None)
    if side.run is not None and step is not None:
        journaled(side.run, step, found)
    return found


def _chat(model: Model, name: str) -> tuple[Chat, str]:
    """The template of a folder, and its name with the digest of what it says: another one is another way of asking."""
    import hashlib

    from shoal.evaluate.model import Local
    from shoal.generate.chat_template import DEFAULT, template_of

    opened = model.opened if isinstance(model, Local) else None
    found = None
    if opened is not None and opened.folder is not None:
        found = template_of(opened.folder, opened.tokenizer, None if name == DEFAULT else name)
    if found is None:
        raise UsageError(f"{model.name} brings no chat template; leave out --template, or name a folder that has one.")
    return found.rendered, f"{name} {hashlib.sha256(found.source.encode()).hexdigest()[:12]}"


def _folder(side: Side, args: argparse.Namespace) -> Path:
    if args.out is not None:
        return Path(args.out)
    return side.run.path / "evaluations" if side.run is not None else workspace(args.workspace) / "evaluations"


def _compared(first: Sequence[Figure], other: Sequence[Figure]) -> list[tuple[Figure, Figure, Paired, float]]:
    from shoal.evaluate.compare import holm, paired

    found = [(a, b, paired(a.values, b.values, a.clusters)) for a, b in zip(first, other, strict=True)]
    return [(a, b, one, p) for (a, b, one), p in zip(found, holm([one.p for *_, one in found]), strict=True)]


def _print(
    figures: Sequence[Figure],
    compared: Sequence[tuple[Figure, Figure, Paired, float]],
    seen: Contamination | None,
    args: argparse.Namespace,
) -> None:
    from dataclasses import asdict

    from shoal.evaluate.compare import sentence
    from shoal.evaluate.contamination import sentence as said_of
    from shoal.evaluate.metrics import MEASURES
    from shoal.evaluate.record import differences, table, told
    from shoal.values import shown

    def words(a: Figure, b: Figure, one: Paired, p: float) -> str:
        measure = MEASURES[a.metric]
        return sentence(one, a.model, b.model, p=p, higher_is_better=measure.higher_is_better, unit=measure.unit)

    if args.json:
        rows = [
            {"task": a.name, "metric": a.measure, **_finite(asdict(one)), "p_corrected": p, "said": words(a, b, one, p)}
            for a, b, one, p in compared
        ]
        more = {} if seen is None else {"contamination": asdict(seen)}
        print(json.dumps({"figures": [told(one) for one in figures], "compared": rows, **more}))
        return
    print("\n".join(table(figures)))
    if compared:
        print("\n" + "\n".join(differences(compared)))
        for a, b, one, p in compared:
            print(f"{a.name} {a.measure}: {words(a, b, one, p)}")
    if seen is not None:
        print(f"\ncontamination: {said_of(seen)}")
        for item in seen.worst:
            print(f"  {item.task} item {item.item}: {item.share:.0%} of it, {item.where}: {shown(item.excerpt)}")


def _finite(row: dict[str, object]) -> dict[str, object]:
    from shoal.readable import json_number

    return {key: json_number(value) if isinstance(value, float) else value for key, value in row.items()}


def _contamination(tasks: Sequence[Task], args: argparse.Namespace) -> Contamination:
    from shoal.data.progress_line import ProgressLine
    from shoal.data.shards import TokenShards
    from shoal.evaluate.contamination import contamination
    from shoal.evaluate.remembered import texts_of

    sources = [TokenShards.open(path) for path in _names(args.contamination)]
    line = ProgressLine("looking through the data", sum(source.tokens for source in sources), quiet=args.json)
    return contamination([text for task in tasks for text in texts_of(task, args.limit)], sources, line.add)


def _lm_eval(args: argparse.Namespace) -> int:
    """lm-eval's own command, told of Shoal's engine."""
    from importlib.util import find_spec

    from shoal.errors import needs_extra

    if not args.more:
        raise UsageError("say which model: `shoal eval lm-eval FOLDER -- --tasks NAME` (a run, or a folder).")
    if find_spec("lm_eval") is None:
        raise needs_extra("lm-eval", "lm-eval", "shoal eval lm-eval")
    of, words = args.more[0], args.more[1:]
    if "," in of or "=" in of:
        raise UsageError(f"lm-eval takes no name with a comma or an equals sign: {of}.")
    import sys

    from lm_eval.__main__ import cli_evaluate

    import shoal.evaluate.lm_eval_model  # noqa: F401  # which registers itself

    given = [f"of={of}", f"workspace_dir={workspace(args.workspace)}"]
    given += [f"{key}={value}" for key, value in (("step", args.step), ("tokenizer", args.tokenizer)) if value]
    given += ["exact=True"] if args.exact else []
    sys.argv = ["lm-eval", "run", "--model", "shoal", "--model_args", ",".join(given), *words]
    cli_evaluate()
    return 0
