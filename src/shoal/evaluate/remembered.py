"""The texts of a task that a model may have been trained on: each question with its right answer, without examples."""

from __future__ import annotations

from dataclasses import replace

from shoal.evaluate.contamination import Text
from shoal.evaluate.questions import Question, questions
from shoal.evaluate.task import CHOICE, GENERATE, FewShot, Task


def texts_of(task: Task, limit: int | None = None) -> list[Text]:
    alone = replace(task, few_shot=FewShot(), description="")
    return [Text(task.name, str(one.number), _text(task, one)) for one in questions(alone, limit)]


def _text(task: Task, asked: Question) -> str:
    if task.kind == GENERATE:
        return f"{asked.asks[0][0]} {asked.right[0] if asked.right else ''}"
    right = asked.right[0] if task.kind == CHOICE and asked.right and asked.right[0] >= 0 else 0
    return "".join(asked.asks[right])
