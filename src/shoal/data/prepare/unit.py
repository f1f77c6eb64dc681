"""One unit of work: read its documents, tokenize them, write its shards, and leave a record that it is done.

The result depends on the unit and the job alone. A unit that was interrupted leaves nothing that counts: shards and
record appear by rename, the record last.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from shoal.data.index import ShardInfo, dtype_for
from shoal.data.prepare.bad_input import Problems
from shoal.data.prepare.readers import Document, documents
from shoal.data.prepare.units import Reading, Unit
from shoal.data.starts import NO_START, Frame
from shoal.data.tokenizer import Tokenizer, load_tokenizer
from shoal.data.writer import ShardWriter

WORK_FOLDER = ".prepare"
BATCH_CHARS = 1 << 20
BATCH_DOCUMENTS = 4096
REPORT_EVERY_S = 0.25


@dataclass(frozen=True)
class Job:
    """All that a worker has to know."""

    out: str
    tokenizer: str
    eos_id: int
    start_id: int | None
    special: bool
    """Special tokens spelled out in a text become their ids."""
    reading: Reading
    skip_bad: bool
    shard_tokens: int
    eval_below: int | None
    """Documents whose hash is below this are held out; None: no split."""

    def sides(self) -> dict[str, Path]:
        out = Path(self.out)
        return {"all": out} if self.eval_below is None else {"train": out / "train", "eval": out / "eval"}

    def load_tokenizer(self) -> Tokenizer:
        start = NO_START if self.start_id is None else self.start_id
        return load_tokenizer(self.tokenizer, self.eos_id, start, self.special)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Job:
        return cls(**{**value, "reading": Reading(**value["reading"])})


class Progress(NamedTuple):
    """What has been done since the last report."""

    input_bytes: int
    text_bytes: int
    tokens: int


Report = Callable[[Progress], None]


def record_file(out: str, unit: int) -> Path:
    return Path(out) / WORK_FOLDER / f"unit-{unit:05d}.json"


def process(
    job: Job,
    unit: Unit,
    tokenizer: Tokenizer,
    report: Report,
    begins: Callable[[int], object] = lambda number: None,
    left_out: Mapping[int, Sequence[str]] | None = None,
) -> None:
    """Do the unit. Raises DataError at bad input unless the job says to skip it. `begins` hears which piece is read;
    `left_out` are pieces that an earlier try could not survive: reason, what, advice (`Problems.found`)."""
    problems = Problems(job.skip_bad)
    sides = {name: Side(folder, unit.number, job, tokenizer) for name, folder in job.sides().items()}
    tally = Tally(report)
    lowest, highest = 1 << 64, -1
    try:
        for number, piece in enumerate(unit.pieces):
            if left_out and number in left_out:
                reason, what, advice = left_out[number]
                problems.found(reason, partial(str, piece.input.path), what, advice)
                continue
            begins(number)
            for document in documents(piece, job.reading, problems, tally.read):
                key = document_hash(document)
                lowest, highest = min(lowest, key), max(highest, key)
                side = "all" if job.eval_below is None else "eval" if key < job.eval_below else "train"
                tally.wrote(*sides[side].add(document))
        for one in sides.values():
            tally.wrote(*one.flush())
        shards = {name: one.close() for name, one in sides.items()}
    except BaseException:
        for one in sides.values():
            one.abort()
        raise
    tally.send()
    record = {
        "unit": unit.number,
        "shards": {name: [s.to_json() for s in infos] for name, infos in shards.items()},
        "skipped": problems.to_json(),
        "text_bytes": tally.text_bytes,
        # As texts: JSON that others can read has no whole numbers of 64 bits.
        "hashes": [f"{lowest:x}", f"{highest:x}"],
        "eval_below": None if job.eval_below is None else f"{job.eval_below:x}",
    }
    write_json(record_file(job.out, unit.number), record)


class Side:
    """The shards of one unit that go to one data set: documents are gathered, tokenized together, written."""

    def __init__(self, folder: Path, unit: int, job: Job, tokenizer: Tokenizer) -> None:
        self._folder = folder
        self._name = f"shard-{unit:05d}"
        self._tokenizer = tokenizer
        self._dtype = dtype_for(tokenizer.vocab_size)
        self._frame = Frame(tokenizer.start_id, tokenizer.eos_id, self._dtype)
        self._masked = job.reading.prompt_field is not None
        self._shard_tokens = job.shard_tokens
        self._pending: list[Document] = []
        self._chars = 0
        self._writer: ShardWriter | None = None
        self._closed: list[ShardInfo] = []

    def add(self, document: Document) -> tuple[int, int]:
        """(bytes of text, tokens) that were written meanwhile."""
        self._pending.append(document)
        self._chars += len(document.text) + len(document.prompt or "")
        if self._chars >= BATCH_CHARS or len(self._pending) >= BATCH_DOCUMENTS:
            return self.flush()
        return 0, 0

    def flush(self) -> tuple[int, int]:
        pending, self._pending, self._chars = self._pending, [], 0
        if not pending:
            return 0, 0
        ids = iter(self._tokenizer.encode_batch([part for d in pending for part in (d.prompt or "", d.text)]))
        tokens, masks, ends, total = [], [], [], 0
        for _ in pending:
            # There may be no prompt, and a normalizer may leave nothing of a text.
            prompt, text = ([part] if part.size else [] for part in (next(ids), next(ids)))
            whole, size, context = self._frame.around(prompt, text)
            tokens += whole
            total += size
            ends.append(total)
            if self._masked:
                masks += [np.zeros(context, np.uint8), np.ones(size - context, np.uint8)]
        self._write(np.concatenate(tokens), np.array(ends), np.concatenate(masks) if self._masked else None)
        return sum(len(d.text.encode()) + len((d.prompt or "").encode()) for d in pending), total

    def close(self) -> list[ShardInfo]:
        if self._writer is not None:
            self._closed.append(self._writer.close())
            self._writer = None
        return self._closed

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()

    def _write(self, ids: Any, ends: Any, mask: Any) -> None:
        """In as many shards as the limit makes it; a document is never cut."""
        begin = done = 0
        while done < len(ends):
            if self._writer is None:
                part = f"-{len(self._closed)}" if self._closed else ""
                self._writer = ShardWriter(self._folder, self._name + part, self._dtype, self._masked)
            room = self._shard_tokens - self._writer.tokens
            fits = int(np.searchsorted(ends, begin + room, "right"))
            if fits <= done and self._writer.tokens == 0:
                fits = done + 1  # longer than a shard: it gets one of its own
            if fits > done:
                stop = int(ends[fits - 1])
                self._writer.add_many(
                    ids[begin:stop], ends[done:fits] - begin, None if mask is None else mask[begin:stop]
                )
                begin, done = stop, fits
            if done < len(ends):
                self.close()


class Tally:
    """Adds up what was read and written, and reports it now and then."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._last_s = time.monotonic()
        self._new = [0, 0, 0]
        self.text_bytes = 0

    def read(self, input_bytes: int) -> None:
        self._new[0] += input_bytes
        if time.monotonic() - self._last_s > REPORT_EVERY_S:
            self.send()

    def wrote(self, text_bytes: int, tokens: int) -> None:
        self.text_bytes += text_bytes
        self._new[1] += text_bytes
        self._new[2] += tokens

    def send(self) -> None:
        self._report(Progress(*self._new))
        self._new = [0, 0, 0]
        self._last_s = time.monotonic()


def document_hash(document: Document) -> int:
    """Decides train or eval by the content alone, so equal documents never end up on both sides."""
    h = xxhash.xxh3_64(document.text.encode())
    if document.prompt is not None:
        h.update(b"\0" + document.prompt.encode())
    return h.intdigest()


def write_json(path: Path, value: Any) -> None:
    """All or nothing, and on disk when this returns."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as f:
        json.dump(value, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
