"""What a model is asked, out of a task's items: texts with their examples, choices, and what is right.

By lm-eval's rules (`fewshot_context`, `construct_requests` of its version 0.4.13): the same texts to the letter, and
the same examples drawn for each question. All templates of a task are filled in by one child with limits.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shoal.errors import DataError
from shoal.evaluate.task import CHOICE, GENERATE, LOGLIKELIHOOD, ROLLING, Item, Task
from shoal.evaluate.templates import Said, choices_of, field_or_text, target_of, text_of
from shoal.generate.limited import Allowance, Refused, limited
from shoal.values import read_large

FEW_SHOT_SEED = 1234  # lm-eval's
MOST_TEXT = 4 << 20  # characters of one question
MOST_ANSWER = 1 << 30
MOST_PARTS = 50_000_000
CPU_S = 60
ITEMS_A_SECOND = 200  # that may be filled in, beyond those

Chat = Callable[[Sequence[Sequence[dict[str, str]]]], list[str]]
"""A chat template: of each conversation the text that a model goes on from."""
CHATS = 500  # that are rendered at a time


@dataclass(frozen=True)
class Question:
    number: int
    """Of the item in its task."""
    asks: tuple[tuple[str, str], ...]
    """A context and what comes after it: one for each choice. Of a text as a whole the context is empty; of what is to
    be written, the continuation."""
    right: tuple[Any, ...]
    """The numbers of the right choices, or the texts that an answer is compared with."""
    lengths: tuple[tuple[int, int], ...] = ()
    """Of each choice: characters and bytes. Of a text as a whole: words and bytes."""
    several: bool = False
    """Whether the task may have several right answers a question."""
    cluster: str | None = None

    @property
    def digest(self) -> str:
        said = json.dumps(asdict(self), ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()


def questions(task: Task, limit: int | None = None, chat: Chat | None = None) -> list[Question]:
    """Of the first items, or of all. The draw of examples goes on from question to question, so the first ones have the
    same whatever the limit."""
    count = len(task.items) if limit is None else min(limit, len(task.items))
    limits = Allowance(CPU_S + count // ITEMS_A_SECOND, 4 << 30, MOST_ANSWER)
    try:
        said = limited(lambda: json.dumps(list(_made(task, count, chat is not None)), allow_nan=False).encode(), limits)
    except Refused as e:
        raise DataError(f"task {task.name}: {e}; correct the task file.") from None
    found = [
        Question(
            one["number"],
            tuple((context, more) for context, more in one["asks"]),
            tuple(one["right"]),
            tuple((a, b) for a, b in one["lengths"]),
            one["several"],
            one["cluster"],
        )
        for one in read_large(said, MOST_PARTS)
    ]
    return found if chat is None or task.kind == ROLLING else _as_chats(found, chat)


def _as_chats(asked: Sequence[Question], chat: Chat) -> list[Question]:
    """Their contexts are conversations so far, spelled as JSON."""
    contexts = list(dict.fromkeys(context for one in asked for context, _ in one.asks))
    made: dict[str, str] = {}
    for at in range(0, len(contexts), CHATS):
        part = contexts[at : at + CHATS]
        made |= zip(part, chat([json.loads(context) for context in part]), strict=True)
    return [replace(one, asks=tuple((made[context], more) for context, more in one.asks)) for one in asked]


def _made(task: Task, count: int, chatting: bool) -> Iterator[dict[str, Any]]:
    """In the child."""
    draw = Draw(task)
    choosing = task.choices is not None
    several = isinstance(target_of(task.target, task.items[0], choosing), list)
    for number, item in enumerate(task.items[:count]):
        try:
            one = _one(task, number, item, draw(item), several, chatting)
        except Refused as e:
            raise Refused(f"item {number:,}: {e}") from None
        for context, more in one.asks:
            if len(context) + len(more) > MOST_TEXT:
                raise Refused(
                    f"item {number:,} has {len(context) + len(more):,} characters, and {MOST_TEXT:,} are most"
                )
        yield asdict(one)


def _one(task: Task, number: int, item: Item, examples: Sequence[Item], several: bool, chatting: bool) -> Question:
    choosing = task.choices is not None
    cluster = None if task.cluster is None else _cluster(task.cluster, item)
    target = target_of(task.target, item, choosing)
    if task.kind == ROLLING:
        text = _as_text(target, "doc_to_target")
        lengths = ((len(re.split(r"\s+", text)), len(text.encode(errors="surrogatepass"))),)
        return Question(number, (("", text),), (), lengths, cluster=cluster)
    choices = [] if task.choices is None else choices_of(task.choices, item)
    text_said = text_of(task.text, item, choosing)
    before = _description(task, item) + _examples(task, examples)
    if task.kind == CHOICE:
        return _choice(task, number, text_said, before, choices, target, several, cluster, chatting)
    context = _whole(before, _as_text(text_said, "doc_to_text"), chatting)
    if task.kind == LOGLIKELIHOOD:
        return Question(number, ((context, _as_text(target, "doc_to_target")),), (), cluster=cluster)
    assert task.kind == GENERATE
    return Question(number, ((context, ""),), _references(target, choices), several=several, cluster=cluster)


def _choice(
    task: Task,
    number: int,
    text: Said,
    before: list[dict[str, str]],
    choices: list[str],
    target: Said | list[Any],
    several: bool,
    cluster: str | None,
    chatting: bool,
) -> Question:
    between = "" if chatting else task.target_delimiter
    if isinstance(text, int):  # the choices are the questions, and the target is what each goes on with
        more = f"{between}{_as_text(target, 'doc_to_target')}"
        asks = [(_whole(before, one, chatting), more) for one in choices]
        right: list[int] = [text]
    else:
        context = _whole(before, _as_text(text, "doc_to_text"), chatting)
        asks = [(context, f"{between}{one}") for one in choices]
        right = _right(target, choices)
    lengths = tuple((len(one), len(one.encode(errors="surrogatepass"))) for one in choices)
    return Question(number, tuple(asks), tuple(right), lengths, several, cluster)


def _right(target: Said | list[Any], choices: list[str]) -> list[int]:
    """A number that no choice has is right for none: as in lm-eval, the item counts as wrong."""
    said = target if isinstance(target, list) else [target]
    found = [choices.index(one) if isinstance(one, str) and one in choices else one for one in said]
    return [int(one) if isinstance(one, int) and one < len(choices) else -100 for one in found]


def _references(target: Said | list[Any], choices: list[str]) -> tuple[str, ...]:
    if choices:
        if not isinstance(target, int) or not -len(choices) <= target < len(choices):
            raise Refused(f"the target {target!r} is the number of none of its {len(choices)} choices")
        return (choices[target],)
    return tuple(str(one) for one in target) if isinstance(target, list) else (str(target),)


def _as_text(said: object, key: str) -> str:
    if not isinstance(said, str):
        raise Refused(f"{key} gives {said!r:.40}, where a text is expected")
    return said


def _cluster(field: str, item: Item) -> str:
    if field not in item:
        raise Refused(f"it has no field {field!r}, which metadata.cluster names")
    return str(item[field])[:200]


def _description(task: Task, item: Item) -> list[dict[str, str]]:
    if not task.description:
        return []
    return [_said("system", field_or_text(task.description, item))]


def _examples(task: Task, examples: Sequence[Item]) -> list[dict[str, str]]:
    shot, choosing = task.few_shot, task.choices is not None
    between = task.target_delimiter if shot.target_delimiter is None else shot.target_delimiter
    after = task.delimiter if shot.delimiter is None else shot.delimiter
    told: list[dict[str, str]] = []
    for one in examples:
        text = text_of(task.text if shot.text is None else shot.text, one, choosing)
        target = target_of(task.target if shot.target is None else shot.target, one, choosing)
        spec = task.choices if shot.choices is None else shot.choices
        choices = [] if spec is None else choices_of(spec, one)
        if isinstance(text, int):
            text, choices = _of_choices(choices, text), []
        if isinstance(target, int) and choices:
            answer = _of_choices(choices, target)
        else:
            answer = _as_text(
                target[0] if isinstance(target, list) and target else target, "an example's doc_to_target"
            )
        question = _as_text(text, "an example's doc_to_text")
        told.append(_said("user", question, between if answer else ""))
        if answer:
            told.append(_said("assistant", answer, after))
    return told


def _of_choices(choices: Sequence[str], number: int) -> str:
    if not -len(choices) <= number < len(choices):
        raise Refused(f"an example names choice {number} of {len(choices)}")
    return choices[number]


def _said(role: str, content: str, after: str = "") -> dict[str, str]:
    return {"role": role, "content": content, "after": after}


def _whole(before: list[dict[str, str]], text: str, chatting: bool) -> str:
    """Without a chat template all stands in one text; with one, examples and question are one message of the user."""
    told = [*before, _said("user", text)]
    if not chatting:
        return "".join(one["content"] + one["after"] for one in told)
    system = [one for one in told if one["role"] == "system"]
    rest = "".join(one["content"] + one["after"] for one in told if one["role"] != "system")
    chat = [{"role": "system", "content": one["content"]} for one in system]
    return json.dumps([*chat, {"role": "user", "content": rest}])


class Draw:
    """The examples of one question after the other, as lm-eval draws them."""

    def __init__(self, task: Task) -> None:
        self._task, self._pool = task, list(task.examples)
        self._random = random.Random(FEW_SHOT_SEED)  # the draw of lm-eval, which is no secret

    def __call__(self, item: Item) -> Sequence[Item]:
        count, pool = self._task.few_shot.count, self._pool
        if not count:
            return []
        own = self._task.own_examples
        if self._task.few_shot.first:
            found = [one for one in pool if one != item] if own else pool
        elif own:
            if len(pool) <= count:
                raise Refused(f"{count} examples are asked for, out of {len(pool)} items of which the question is one")
            found = [one for one in self._random.sample(pool, count + 1) if one != item][:count]
            if len(found) < count:  # the item was there several times
                rest = [one for one in pool if one != item]
                found = self._random.sample(rest, count) if len(rest) >= count else rest
        else:
            found = self._random.sample(pool, count) if len(pool) >= count else pool
        if len(found) < count:
            raise Refused(f"{count} examples are asked for, and there are {len(found)}")
        return found[:count]
