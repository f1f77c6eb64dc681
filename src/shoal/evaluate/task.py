"""What a task is: items, how a question and its answer are made of one, what is asked of a model, and what counts.

The names and the meaning are those of lm-eval's task files (its version 0.4.13), so that one file runs in both.
`shoal.evaluate.task_file` reads them; a task that is made (`shoal.evaluate.generated`) goes the same way, out of the
same keys and items that are there already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LOGLIKELIHOOD, ROLLING = "loglikelihood", "loglikelihood_rolling"
CHOICE, GENERATE = "multiple_choice", "generate_until"
KINDS = (LOGLIKELIHOOD, ROLLING, CHOICE, GENERATE)

Item = Mapping[str, Any]
"""A question of a task: a line of its file."""
Template = str | int
"""Of a text: a field's name, or jinja over the fields of an item; a number where one of the choices is meant."""


@dataclass(frozen=True)
class Metric:
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `exact_match`: ignore_case, ignore_punctuation, ignore_numbers, regexes_to_ignore."""


@dataclass(frozen=True)
class Filter:
    """What is made of an answer before it is compared. A task with several has each metric once for each."""

    name: str
    steps: tuple[tuple[str, Mapping[str, Any]], ...]
    """The name of a function and its options."""


AS_IT_IS = Filter("none", (("take_first", {}),))


@dataclass(frozen=True)
class FewShot:
    """Examples with their answers, which stand before a question."""

    count: int = 0
    first: bool = False
    """The first of them, whatever the question; else they are drawn."""
    text: Template | None = None
    target: Template | Sequence[str] | None = None
    choices: str | Sequence[str] | None = None
    delimiter: str | None = None
    target_delimiter: str | None = None
    """None: as of the task."""


@dataclass(frozen=True)
class Until:
    """How an answer is written, and where it ends."""

    stops: tuple[str, ...] = ("\n\n",)
    max_tokens: int = 256
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_k: int | None = None
    top_p: float = 1.0


@dataclass(frozen=True)
class Task:
    name: str
    kind: str
    """One of KINDS."""
    items: Sequence[Item]
    examples: Sequence[Item]
    """Out of which those of few-shot are taken."""
    own_examples: bool
    """Whether they are the items themselves: then a question is no example of its own."""
    text: Template
    target: Template | Sequence[str]
    choices: str | Sequence[str] | None
    metrics: tuple[Metric, ...]
    filters: tuple[Filter, ...] = (AS_IT_IS,)
    few_shot: FewShot = FewShot()
    until: Until = Until()
    description: str = ""
    delimiter: str = "\n\n"
    """Between examples."""
    target_delimiter: str = " "
    version: str = "0"
    cluster: str | None = None
    """The field by which items belong together (`metadata: {cluster: FIELD}`): intervals account for it."""
    digest: str = ""
    """Of all that stands in its file: another one is another task."""
