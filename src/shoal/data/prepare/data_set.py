"""`shoal data prepare`: text in, a data set of token shards out.

    inputs → units (shoal.data.prepare.units) → shards, by workers (unit, workers) → index.json

A rerun of the same command goes on where it was stopped, whatever stopped it (out_folder); the index comes last.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from shoal import __version__
from shoal.data.broken import shown
from shoal.data.index import Index, ShardInfo, write_index
from shoal.data.prepare.bad_input import Problems
from shoal.data.prepare.inputs import Input, expand
from shoal.data.prepare.memory_limit import check_limits, peak_bytes
from shoal.data.prepare.out_folder import OutFolder, digest, writing_to
from shoal.data.prepare.unit import WORK_FOLDER, Job, Progress
from shoal.data.prepare.units import TABLES, Reading, Unit, plan_units
from shoal.data.prepare.workers import peak_rss_bytes, run_here, run_in_workers
from shoal.data.progress_line import ProgressLine
from shoal.data.shards import TokenShards
from shoal.data.tokenizer import BYTE, TOKENIZER_FILE, Tokenizer, load_tokenizer
from shoal.errors import DataError, Stopped, UsageError

DEFAULT_SHARD_TOKENS = 1 << 28
MAX_NAMED_INPUTS = 1000  # the index of a data set of a million files should not name them all


@dataclass(frozen=True)
class Options:
    """What `shoal data prepare` can be told. `workers` and `quiet` do not change the result."""

    tokenizer: str = BYTE
    eos: str | None = None
    start: str | None = None
    """The token that starts a document, or `none`; None: the tokenizer's own (`shoal.data.starts`)."""
    special: bool = False
    """Special tokens spelled out in a text become their ids."""
    format: str = "auto"
    reading: Reading = field(default_factory=Reading)
    eval_fraction: float | None = None
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    skip_bad: bool = False
    overwrite: bool = False
    workers: int | None = None
    quiet: bool = False


@dataclass(frozen=True)
class Work:
    """What this call did, for the summary; the rest of a data set may have been there already."""

    workers: int = 0
    units: int = 0
    units_found_done: int = 0
    text_bytes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    """Of this process and its workers, each at its own highest."""
    bound_bytes: int = 0
    """The most that it may be (shoal.data.prepare.memory_limit)."""


@dataclass(frozen=True)
class Prepared:
    """What came out: the data sets by name (`all`, or `train` and `eval`), and what it took."""

    sets: dict[str, tuple[Path, Index]]
    work: Work
    already: bool = False
    """All of it was there; nothing was done."""

    @property
    def tokens(self) -> int:
        return sum(index.tokens for _, index in self.sets.values())

    @property
    def documents(self) -> int:
        return sum(index.documents for _, index in self.sets.values())

    @property
    def skipped(self) -> dict[str, Any]:
        return next(iter(self.sets.values()))[1].source.get("skipped", {})


def prepare(named: Sequence[str], out: str | os.PathLike[str], options: Options | None = None) -> Prepared:
    """Prepare the named inputs into the folder `out`. SIGINT and SIGTERM raise Stopped; calling it again goes on."""
    with told_to_stop("finished parts are kept; run the same command again to go on"):
        return _prepare(named, out, options or Options())


def _prepare(named: Sequence[str], out: str | os.PathLike[str], options: Options) -> Prepared:
    began_s = time.monotonic()
    _check(options, out)
    tokenizer = load_tokenizer(options.tokenizer, options.eos, options.start, options.special)
    inputs, passed_over = expand(named, options.format, options.reading.split, leave_out=Path(out))
    reading = pin_streams(inputs, options.reading)
    found = Problems(options.skip_bad)
    units = plan_units(inputs, reading, found)
    if not units:
        raise DataError(f"there is nothing to read in {', '.join(named)}.")
    job = Job(
        out=os.fspath(out),
        tokenizer=BYTE if tokenizer.name == BYTE else str(Path(out) / WORK_FOLDER / TOKENIZER_FILE),
        eos_id=tokenizer.eos_id,
        start_id=tokenizer.start_id,
        special=tokenizer.special,
        reading=reading,
        skip_bad=options.skip_bad,
        shard_tokens=options.shard_tokens,
        eval_below=None if options.eval_fraction is None else int(options.eval_fraction * 2**64),
    )
    with writing_to(out), OutFolder(job, digest(job, units, tokenizer), options.overwrite) as folder:
        if folder.complete:
            sets = {side: (path, TokenShards.open(path).index) for side, path in folder.sides.items()}
            return Prepared(sets, Work(), already=True)
        tokenizer.save(folder.work)
        tokenizer_bytes = 0 if tokenizer.name == BYTE else os.path.getsize(job.tokenizer)
        folder.sweep(units)
        done = [unit for unit in units if folder.record(unit) is not None]
        numbers = {unit.number for unit in done}
        line = ProgressLine("prepare", sum(u.size_bytes for u in units), sum(u.size_bytes for u in done), options.quiet)
        if passed_over:
            line.say(f"passed over {_some(passed_over)}: name a file to take it, or all with --format")
        if folder.note:
            line.say(f"{folder.note}: {len(done)} of {len(units)} units are done" if done else folder.note)
        with line:
            runner = _Runner(units, folder, options.workers or available_cores(), line)
            runner.run(job, [unit for unit in units if unit.number not in numbers])
            runner.fill_both_sides(job)
        sets = _publish(job, units, folder, tokenizer, found, _source(named, inputs, options, reading))
        pieces = sum(len(unit.pieces) for unit in units)
        work = replace(
            runner.work,
            units=len(units),
            units_found_done=len(done),
            seconds=time.monotonic() - began_s,
            bound_bytes=peak_bytes(reading, tokenizer_bytes, runner.work.workers, pieces),
        )
        return Prepared(sets, work)


class _Runner:
    """Does units, here or in workers, and adds up what that took."""

    def __init__(self, units: Sequence[Unit], folder: OutFolder, workers: int, line: ProgressLine) -> None:
        self._units = units
        self._folder = folder
        self._workers = workers
        self._line = line
        self.work = Work(workers=1, peak_rss_bytes=peak_rss_bytes())

    def run(self, job: Job, units: Sequence[Unit]) -> None:
        workers = min(self._workers, len(units))
        # A process more would cost more than it brings, but readers that may crash stay out of this one.
        if workers > 1 or any(piece.input.kind in TABLES for unit in units for piece in unit.pieces):
            rss_bytes = peak_rss_bytes() + run_in_workers(job, units, workers, self._folder.lock_fd, self._report)
        else:
            rss_bytes = run_here(job, units, self._report)
        most = max(self.work.peak_rss_bytes, rss_bytes)
        self.work = replace(self.work, workers=max(self.work.workers, workers), peak_rss_bytes=most)

    def fill_both_sides(self, job: Job) -> None:
        """In a small corpus chance may hold out nothing, or everything: then one document changes sides."""
        if job.eval_below is None:
            return
        hashes = [record["hashes"] for record in self._records() if record["hashes"][1] >= 0]
        if not hashes:
            return  # no documents at all, which has an error of its own
        lowest, highest = min(low for low, _ in hashes), max(high for _, high in hashes)
        if lowest == highest:
            raise DataError(
                "there is only one document, which cannot be split into train and eval; cut it into documents with "
                "--separator or --per-line, or leave out --eval-fraction."
            )
        below = min(max(job.eval_below, lowest + 1), highest)
        again = [
            unit
            for unit, record in zip(self._units, self._records(), strict=True)
            if record["eval_below"] != below and (lowest in record["hashes"] or highest in record["hashes"])
        ]
        if below != job.eval_below and again:
            self.run(replace(job, eval_below=below), again)
            self._folder.sweep(self._units)

    def _records(self) -> list[dict[str, Any]]:
        return records_of(self._units, self._folder)

    def _report(self, progress: Progress) -> None:
        self._line.add(progress.input_bytes, progress.text_bytes, progress.tokens)
        self.work = replace(
            self.work,
            text_bytes=self.work.text_bytes + progress.text_bytes,
            tokens=self.work.tokens + progress.tokens,
        )


def records_of(units: Sequence[Unit], folder: OutFolder) -> list[dict[str, Any]]:
    records = [folder.record(unit) for unit in units]
    if None in records:
        raise DataError(f"a finished part of {folder.path} has vanished or changed; run the same command again.")
    return [record for record in records if record is not None]


def _publish(
    job: Job, units: Sequence[Unit], folder: OutFolder, tokenizer: Tokenizer, found: Problems, source: Mapping[str, Any]
) -> dict[str, tuple[Path, Index]]:
    records = records_of(units, folder)
    for record in records:
        found.add(record["skipped"])
    if not any(shards for record in records for shards in record["shards"].values()):
        skipped = "; all of it was skipped as bad" if found.counts else ""
        raise DataError(f"there are no documents in the input: nothing but empty text{skipped}.")
    sets = {}
    for side, path in sorted(folder.sides.items()):  # train comes last: with it, all is there
        shards = [ShardInfo.from_json(s) for record in records for s in record["shards"][side]]
        tokenizer.save(path)
        index = write_index(
            path,
            shards,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            start_id=tokenizer.start_id,
            tokenizer=tokenizer.name,
            source={**source, "side": side, "skipped": found.to_json()},
        )
        sets[side] = (path, index)
    folder.forget_records()
    return dict(reversed(sets.items()))


def _source(named: Sequence[str], inputs: Sequence[Input], options: Options, reading: Reading) -> dict[str, Any]:
    """For index.json: where the tokens came from. Nothing that differs between two runs of the same command."""
    return {
        "named": [shown(name) for name in named],
        "inputs": [{"path": shown(i.path), "size_bytes": i.size_bytes} for i in inputs[:MAX_NAMED_INPUTS]],
        "input_count": len(inputs),
        "options": {
            **asdict(reading),
            "tokenizer": shown(options.tokenizer),
            "special": options.special,
            "format": options.format,
            "eval_fraction": options.eval_fraction,
            "shard_tokens": options.shard_tokens,
            "skip_bad": options.skip_bad,
        },
        "shoal": __version__,
    }


def _check(options: Options, out: str | os.PathLike[str]) -> None:
    if "://" in os.fspath(out):
        raise UsageError(f"--out {os.fspath(out)} is no folder of this machine; prepare into one and copy it there.")
    if options.eval_fraction is not None and not 0 < options.eval_fraction < 1:
        raise UsageError(f"--eval-fraction is a share between 0 and 1, and {options.eval_fraction} is not.")
    if options.shard_tokens < 1:
        raise UsageError(f"--shard-tokens {options.shard_tokens} leaves no room for a token; give 1 or more.")
    if options.workers is not None and options.workers < 1:
        raise UsageError(f"--workers {options.workers} is nobody to do the work; give 1 or more.")
    check_limits(options.reading)
    if options.reading.separator == "":
        raise UsageError("--separator is empty; give what stands between two documents, such as '\\n\\n\\n'.")


def pin_streams(inputs: Sequence[Input], reading: Reading) -> Reading:
    """What is read from the hub stays the same revision to the end, and to the end of a rerun."""
    streams = [i for i in inputs if i.kind == "hf-stream"]
    if not streams:
        return reading
    if len(streams) > 1:
        raise UsageError("only one dataset can be streamed at a time; prepare each into a folder of its own.")
    from shoal.data.prepare.readers_tables import pinned

    return pinned(streams[0], reading)


@contextmanager
def told_to_stop(state: str) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Stopped wherever the work is."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals; whoever called from another one does
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)  # one is enough: the workers are being ended
        name = signal.Signals(number).name
        raise Stopped(f"stopped by {name}: {state}.")

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: the terminal may go away
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _some(paths: Sequence[str]) -> str:
    rest = f" and {len(paths) - 3} other files" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + rest
