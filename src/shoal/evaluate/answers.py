"""Answers on disk: one line for each question that is done, so that an evaluation goes on where it was killed.

A file belongs to one task, one model and one way of asking; their digests stand in its first line. Questions are asked
in groups that depend on the task alone, and a group's lines are written in their order. So the file of an evaluation
that was killed and started again is byte for byte that of one that ran through. The end of a line that was torn off is
cut away before anything is added.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.errors import DataError
from shoal.evaluate.questions import Question
from shoal.plain_file import open_plain, read_plain
from shoal.values import BadValue, each, field, flag, made, name, read_object, real, short, text, whole

FORMAT = 1
MOST_BYTES = 4 << 30
MOST_LINE = 16 << 20


@dataclass(frozen=True)
class Head:
    """What the answers of a file are of."""

    task: str
    task_digest: str
    model: str
    model_digest: str
    asked: str
    """How: "plain", or by which chat template."""
    group: int
    """Questions that are asked together."""
    format: int = FORMAT

    @property
    def file_name(self) -> str:
        said = json.dumps([self.task_digest, self.model_digest, self.asked, self.group])
        plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in self.task)[:60]
        return f"{plain}-{hashlib.sha256(said.encode()).hexdigest()[:16]}.jsonl"


@dataclass(frozen=True)
class Answer:
    question: str
    """The digest of what was asked."""
    number: int
    scores: tuple[tuple[float, bool], ...] = ()
    text: str | None = None


class Answers:
    """An open file of answers. `done` has those that are there."""

    def __init__(self, folder: Path, head: Head) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / head.file_name
        self.done: dict[str, Answer] = {}
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._fd = open_plain(self.path, flags)
        try:
            _alone(self._fd, self.path)
            kept = self._read(head)
            os.ftruncate(self._fd, kept)
            if not kept:
                self._write(asdict(head))
        except BaseException:
            self.close()
            raise

    def _read(self, head: Head) -> int:
        """How many bytes of it are whole lines."""
        data = read_plain(self.path, MOST_BYTES)
        kept = data.rfind(b"\n") + 1
        for n, line in enumerate(data[:kept].splitlines()):
            try:
                said = read_object(line, most_bytes=MOST_LINE)
                if n == 0:
                    _same(said, head)
                else:
                    answer = answer_of(said)
                    self.done[answer.question] = answer
            except BadValue as e:
                raise DataError(
                    f"{self.path} line {n + 1:,} is damaged: {e}; move the file away to have its questions asked again."
                ) from None
        return kept

    def add(self, answers: Sequence[Answer]) -> None:
        new = [answer for answer in answers if answer.question not in self.done]
        self._write(*(_line(answer) for answer in new))
        self.done |= {answer.question: answer for answer in new}

    def _write(self, *rows: dict[str, Any]) -> None:
        left = memoryview("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        while left:
            left = left[os.write(self._fd, left) :]

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def missing(groups: Sequence[Sequence[Question]], done: dict[str, Answer]) -> Iterator[Sequence[Question]]:
    """The groups of which anything is to be asked. A group is asked again as a whole: what is computed together decides
    the last digits."""
    for group in groups:
        if any(one.digest not in done for one in group):
            yield group


def _line(answer: Answer) -> dict[str, Any]:
    told: dict[str, Any] = {"question": answer.question, "number": answer.number}
    return told | ({"scores": answer.scores} if answer.text is None else {"text": answer.text})


def answer_of(said: dict[str, Any]) -> Answer:
    return made(
        Answer,
        said,
        question=name,
        number=whole,
        scores=lambda rows: tuple(each(_score, 10_000)(rows)),
        text=lambda one: text(one, MOST_LINE),
    )


def _score(said: object) -> tuple[float, bool]:
    if not isinstance(said, list) or len(said) != 2:
        raise BadValue("no pair of a number and a flag")
    return real(said[0]), flag(said[1])


def _same(said: dict[str, Any], head: Head) -> None:
    if field(said, "format", whole) != FORMAT:
        raise BadValue("it is of another version of Shoal", "format")
    for key in ("task_digest", "model_digest", "asked"):
        if field(said, key, short) != getattr(head, key):
            raise BadValue("it is another one's", key)


def _alone(fd: int, path: Path) -> None:
    """Two processes that write one file would ask everything twice."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{path} is being written by another evaluation of the same; wait for it.") from None
