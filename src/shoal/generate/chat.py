"""A conversation with a model that is opened here: messages in, the pieces of an answer out while they come.

The engine stays between the turns, and its prefix cache with it: of the second question only what is new is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from shoal import values
from shoal.errors import DataError, UsageError
from shoal.generate.answers import Answer
from shoal.generate.chat_template import PLAIN_STOP, ChatTemplate, plain_template, template_of
from shoal.generate.opened import Opened
from shoal.generate.request import ERROR, Sampling
from shoal.generate.texts import Speaker
from shoal.plain_file import is_plain, read_object
from shoal.values import BadValue, inside

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Ended:
    """How an answer ended, for a person."""

    whole: bool
    why: str


class Partner(Protocol):
    """Who answers: a model that is opened here, or one behind a URL."""

    name: str

    def answer(self, messages: Messages, stopped: Callable[[], bool]) -> Iterator[str]:
        """The pieces of an answer; it ends early once it is `stopped`. UsageError: it cannot be asked that."""
        ...

    def ended(self) -> Ended:
        """The last answer."""
        ...


class Here:
    def __init__(
        self, opened: Opened, sampling: Sampling, stops: Sequence[str], exact: bool, template: str | None = None
    ) -> None:
        """`template` is the name of one of several."""
        self.name, self._opened = opened.version, opened
        self.template = template_for(opened, template)
        ends = sampling.stop_ids | self.template.stop_ids(opened.tokenizer) | _ends(opened.folder)
        self._sampling = replace(sampling, stop_ids=ends)
        self._stops = [*stops, *([PLAIN_STOP] if self.template.is_plain else [])]
        self._engine = opened.engine(batch=1, exact=exact)
        self._speaker = Speaker(self._engine, opened.tokenizer)
        self._last: Answer | None = None

    def answer(self, messages: Messages, stopped: Callable[[], bool]) -> Iterator[str]:
        ids, room = self.template.tokens(self._opened.tokenizer, messages), self._engine.context
        if len(ids) >= room:
            raise UsageError(
                f"the conversation has {len(ids):,} tokens, and the model's context is {room:,}: /reset begins anew."
            )
        most = min(self._sampling.max_tokens or room, room - len(ids))
        number = self._speaker.ask(ids, replace(self._sampling, max_tokens=most), self._stops)
        self._last = answer = Answer("", ids)
        try:
            while self._speaker.busy and not stopped():
                for piece in self._speaker.step():
                    answer.add(piece)
                    yield piece.text.lstrip() if self.template.is_plain and answer.text == piece.text else piece.text
        finally:
            if answer.finish is None:
                self._speaker.cancel(number)
                for piece in self._speaker.run():
                    answer.finish = piece.finish
        if answer.finish == ERROR:
            raise DataError(f"the answer ended early: {answer.error}")

    def ended(self) -> Ended:
        if self._last is None:
            return Ended(True, "")
        full = len(self._last.prompt_tokens) + len(self._last.tokens) >= self._engine.context
        why = f"as the model's context of {self._engine.context:,} tokens is full" if full else ""
        return Ended(self._last.finish == "stop", why or self._last.why(self._engine.context))


def template_for(opened: Opened, name: str | None = None) -> ChatTemplate:
    """The model's own, or the plain one."""
    found = None if opened.folder is None else template_of(opened.folder, opened.tokenizer, name)
    if found is None and name is not None:
        raise UsageError(f"{opened.name} brings no chat template, and none is called '{name}'; leave the name out.")
    return found or plain_template(opened.name)


def _ends(folder: Path | None) -> frozenset[int]:
    """The tokens that end an answer, as the folder's own files say."""
    ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if folder is not None and is_plain(folder / name):
            try:
                said = read_object(folder / name).get("eos_token_id")
                with inside(f"{folder / name}: eos_token_id"):
                    many = values.items(said if isinstance(said, list) else [] if said is None else [said], 1000)
                    ends |= {values.whole(one, 1 << 31) for one in many}
            except BadValue as e:
                raise DataError(f"{e}; correct it.") from None
    return frozenset(ends)
