"""Tasks that are asked of the model while it trains (`eval.tasks`), and what it writes by then (`eval.samples`).

The trainer's weights become one whole model on each process, which the engine of `shoal eval` asks: every process takes
its share of the groups of questions, and the answers meet. Groups are the same on any number of processes, so the
figures are those of one process. No random number of training is drawn, and nothing of the model is changed: a run with
tasks takes the same steps as one without.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from shoal.checkpoint.foreign.export import tokenizer_of_data
from shoal.data.decoding import continued
from shoal.data.starts import begun
from shoal.data.tokenizer import Tokenizer
from shoal.errors import DataError, NumericsError, SpecError
from shoal.evaluate.answers import Answer
from shoal.evaluate.ask import GROUP, PLAIN, answered, figures, grouped
from shoal.evaluate.generated.catalogue import first_of
from shoal.evaluate.model import Local
from shoal.evaluate.questions import Question, questions
from shoal.evaluate.record import told
from shoal.evaluate.task import GENERATE, ROLLING, Task
from shoal.evaluate.task_file import load_task, task_of
from shoal.evaluate.tokens import Encoder
from shoal.generate.opened import Opened, made_of
from shoal.generate.request import ERROR, Sampling
from shoal.own.code import Code
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.parallel.whole import whole_weights
from shoal.spec.base import TASK_FILES
from shoal.spec.run import Run

if TYPE_CHECKING:
    from shoal.train.training import Tell  # whose hooks ask when

T = TypeVar("T")
BATCH = 16
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class Asked:
    """A task and its questions, which every process has."""

    task: Task
    groups: tuple[Sequence[Question], ...]

    @property
    def questions(self) -> list[Question]:
        return [one for group in self.groups for one in group]


class Tasks:
    """Made before the first step, so that what cannot be asked is refused then."""

    def __init__(self, run: Run, place: Place, model: Laid, code: Code, tell: Tell) -> None:
        self._run, self._place, self._model, self._code, self._tell = run, place, model, code, tell
        self._tokenizer = tokenizer_of_data(run)
        encoder = Encoder(self._tokenizer, model.shape.max_seq_len, self._tokenizer.start_id is not None)
        self._asked = [asked_of(name, run.eval.limit, encoder) for name in run.eval.tasks]
        self._prompts = prompts_of(run, self._tokenizer, model.shape.max_seq_len)

    def __call__(self, step: int) -> None:
        """Collective."""
        begin = round(time.time(), 6)
        opened = self._opened(step)
        model = Local(opened, BATCH)
        if self._asked:
            found = [row for one in self._asked for row in self._figures(one, model)]
            self._tell("tasks", step=step, begin=begin, figures=found)
            begin = round(time.time(), 6)
        if self._prompts:
            self._tell("samples", step=step, begin=begin, texts=self._written(opened))
        del opened, model
        if self._place.device.type == "cuda":
            torch.cuda.empty_cache()  # of a whole model: training needs the room

    def _opened(self, step: int) -> Opened:
        tensors = whole_weights(self._model, DTYPES.get(str(self._run.eval.precision)))
        whole = made_of(self._run, self._model.shape, self._code, tensors).to(self._place.device)
        return Opened(whole.eval(), self._tokenizer, self._run.name, step, None)

    def _figures(self, asked: Asked, model: Local) -> list[dict[str, Any]]:
        mine = [one for group in self._share(asked.groups) for one in answered(asked.task, model, group)]
        by_question: dict[str, Answer] = {one.question: one for one in self._together(mine)}
        if self._place.rank != 0:
            return []  # rank 0 tells
        done = [by_question[one.digest] for one in asked.questions]
        return [told(one) for one in figures(asked.task, asked.questions, done, model.name, PLAIN)]

    def _written(self, opened: Opened) -> list[dict[str, Any]]:
        """Each prompt by itself, so that its text is the same whoever writes it."""
        mine = [(number, self._one(opened, tokens)) for number, tokens in self._share(list(enumerate(self._prompts)))]
        by_number = dict(self._together(mine))
        return [{"prompt": text, **by_number[k]} for k, text in enumerate(self._run.eval.samples)]

    def _one(self, opened: Opened, prompt: Sequence[int]) -> dict[str, Any]:
        end = self._tokenizer.eos_id
        engine = opened.engine(batch=1)
        engine.submit(prompt, Sampling(self._run.eval.sample_tokens, temperature=0, stop_ids=frozenset({end})))
        events = list(engine.run())
        if events[-1].finish == ERROR:
            raise NumericsError(f"eval.samples at step {opened.step}: {events[-1].error}")
        tokens = [event.token for event in events if event.token is not None]
        return {"text": continued(self._tokenizer, prompt, tokens), "tokens": len(tokens), "end": events[-1].finish}

    def _share(self, items: Sequence[T]) -> Sequence[T]:
        return items[self._place.rank :: self._place.world]

    def _together(self, mine: list[T]) -> list[T]:
        if self._place.world == 1:
            return mine
        every: list[list[T]] = [[] for _ in range(self._place.world)]
        dist.all_gather_object(every, mine)
        return [one for each in every for one in each]


def asked_of(name: str, limit: int | None, encoder: Encoder) -> Asked:
    """A task file, or a made task by its name, whose questions all fit the model."""
    if name.endswith(TASK_FILES):
        task = load_task(Path(name))
    else:
        made = first_of(name, limit)
        task = task_of({**made.keys, "test_split": "test"}, {"test": made.items, "train": made.examples}, name)
    asked = questions(task, limit)
    try:
        for one in asked:
            _fits(task, one, encoder)
    except DataError as e:
        raise SpecError(f"eval.tasks {name} cannot be asked of this model: {e}") from None
    return Asked(task, tuple(grouped(asked, GROUP)))


def _fits(task: Task, one: Question, encoder: Encoder) -> None:
    if task.kind == GENERATE:
        encoder.prompt(one.asks[0][0], task.until.max_tokens)
    elif task.kind != ROLLING:
        for context, more in one.asks:
            encoder.pair(context, more)


def prompts_of(run: Run, tokenizer: Tokenizer, context: int) -> list[list[int]]:
    """As `shoal sample` begins them, with room for what is written."""
    found = [begun(tokenizer.encode(text), tokenizer.start_id) for text in run.eval.samples]
    for text, tokens in zip(run.eval.samples, found, strict=True):
        if not tokens:
            raise SpecError("eval.samples has an empty beginning, and this tokenizer has no start token: give a text.")
        if len(tokens) + run.eval.sample_tokens > context:
            raise SpecError(
                f"eval.samples {text[:40]!r} has {len(tokens):,} tokens, and {run.eval.sample_tokens:,} are written "
                f"(eval.sample_tokens), but the model sees {context:,}: shorten one of them."
            )
    return found
