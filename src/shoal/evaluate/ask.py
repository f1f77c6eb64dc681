"""From a task and a model to figures: groups of questions, their answers, the value of each, and the intervals.

`answered` is pure: a rank that is given every fourth group gives the answers that one process would give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.evaluate.answers import Answer, Answers, Head, missing
from shoal.evaluate.filters import filtered
from shoal.evaluate.metrics import Value, of_answers, of_scores, per_item, together
from shoal.evaluate.model import Model
from shoal.evaluate.questions import Chat, Question, questions
from shoal.evaluate.statistics import Interval
from shoal.evaluate.task import GENERATE, ROLLING, Task

GROUP = 32
PLAIN = "plain"


@dataclass(frozen=True)
class Figure:
    """One metric of one task."""

    task: str
    version: str
    """Of the task."""
    metric: str
    filter: str
    """"none" where the answers are taken as they are."""
    found: Interval
    values: tuple[float, ...]
    """Of each item, for comparisons; the greater the better, or as the metric has it."""
    clusters: tuple[str, ...] | None
    model: str
    asked: str
    few_shot: int

    @property
    def name(self) -> str:
        """Of the task and how it was asked: two that differ in that do not compare."""
        how = "" if self.asked == PLAIN else " (template)"
        shots = f" {self.few_shot}-shot" if self.few_shot else ""
        return f"{self.task}{shots}{how}"

    @property
    def measure(self) -> str:
        return self.metric if self.filter == "none" else f"{self.metric},{self.filter}"


@dataclass(frozen=True)
class Asking:
    """How a task is asked."""

    limit: int | None = None
    group: int = GROUP
    chat: Chat | None = None
    asked: str = PLAIN


Progress = Callable[[int], None]


def grouped(asked: Sequence[Question], group: int) -> list[Sequence[Question]]:
    return [asked[at : at + group] for at in range(0, len(asked), group)]


def answered(task: Task, model: Model, group: Sequence[Question]) -> list[Answer]:
    if task.kind == GENERATE:
        said = model.written(group, task.until)
        return [Answer(one.digest, one.number, (), text) for one, text in zip(group, said, strict=True)]
    if task.kind == ROLLING:
        rolled = model.rolled(group)
        return [Answer(one.digest, one.number, (score,)) for one, score in zip(group, rolled, strict=True)]
    judged = model.judged(group)
    return [Answer(one.digest, one.number, tuple(scores)) for one, scores in zip(group, judged, strict=True)]


def evaluated(
    task: Task, model: Model, folder: Path, asking: Asking, progress: Progress = lambda done: None
) -> list[Figure]:
    """Asks what is not answered yet; its answers are kept in `folder`."""
    asked = questions(task, asking.limit, asking.chat)
    head = Head(task.name, task.digest, model.name, model.digest, asking.asked, asking.group)
    with Answers(folder, head) as answers:
        progress(sum(one.digest in answers.done for one in asked))
        for group in missing(grouped(asked, asking.group), answers.done):
            new = sum(one.digest not in answers.done for one in group)
            answers.add(answered(task, model, group))
            progress(new)
        done = [answers.done[one.digest] for one in asked]
    return figures(task, asked, done, model.name, asking.asked)


def figures(task: Task, asked: Sequence[Question], done: Sequence[Answer], model: str, how: str) -> list[Figure]:
    clusters = None if task.cluster is None else tuple(str(one.cluster) for one in asked)
    found = []
    for name, metric, values in _values(task, asked, done):
        spread = together(metric, values, clusters)
        each = tuple(per_item(metric, values))
        found.append(
            Figure(task.name, task.version, metric, name, spread, each, clusters, model, how, task.few_shot.count)
        )
    return found


def _values(task: Task, asked: Sequence[Question], done: Sequence[Answer]) -> list[tuple[str, str, list[Value]]]:
    if task.kind != GENERATE:
        return [
            ("none", one.name, [of_scores(one.name, q, a.scores) for q, a in zip(asked, done, strict=True)])
            for one in task.metrics
        ]
    made = filtered(task.filters, [one.text or "" for one in done])
    return [
        (name, one.name, list(of_answers(one, asked, answers)))
        for one in task.metrics
        for name, answers in made.items()
    ]
