"""Follows a run's journal and tells it as it happens: what `shoal train` shows, also when one looks in later."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from shoal import readable
from shoal.journal.journal import Record, read
from shoal.journal.rundir import RunDir
from shoal.journal.tail import REMARKS, newest_session_offset
from shoal.observe import evaluations, tasks
from shoal.observe.console import Console
from shoal.observe.throughput import duration_s


class Follower:
    """`poll()` a few times a second; it costs one `stat` when nothing happened.

    Begins with the newest session in the journal, or with what comes next when `replay` is False.
    """

    def __init__(
        self, run_dir: RunDir, total_steps: int | None = None, stream: TextIO | None = None, replay: bool = True
    ) -> None:
        self._path = run_dir.journal_file
        self._name = run_dir.name
        self.console = Console(total_steps, stream)
        self._offset = 0
        if self._path.exists():
            session = newest_session_offset(self._path)
            self._offset = session if replay else self._path.stat().st_size
            if not replay and (start := _start(self._path, session)):
                self.console.start(start)

    def poll(self) -> bool:
        """Shows what is new; True once the session has been closed."""
        closed = False
        if self._path.exists() and self._path.stat().st_size > self._offset:
            for record, after in read(self._path, self._offset):
                self._offset = after
                self._tell(record)
                closed = record.get("kind") == "close" or (closed and record.get("kind") in REMARKS)
        self.console.refresh()
        return closed

    def close(self) -> None:
        self.console.close()

    def _tell(self, record: Record) -> None:
        if record.get("kind") == "step":
            self.console.step(record)
            return
        if record.get("kind") == "start":
            self.console.start(record)
        elif record.get("kind") == "close":
            self.console.close()
        text = sentence(record, self._name)
        if text:
            self.console.say(text)


def _start(path: Path, session_offset: int) -> Record | None:
    """What the session's first attempt said it runs on; a restart runs on the same."""
    return next((record for record, _ in read(path, session_offset) if record.get("kind") == "start"), None)


def sentence(record: Record, name: str) -> str | None:
    """A journal record as a line to read; None for those that say nothing to a person."""
    step = f"step {record.get('step')}"
    match record.get("kind"):
        case "open":
            return f"{'resuming' if record.get('resumed') else 'training'} {name}"
        case "start":
            return _started(record)
        case "eval":
            return f"{step}: evaluation loss {evaluations.sentence(record)}"
        case "tasks":
            return f"{step}: {tasks.sentence(record)}"
        case "samples" if record.get("texts"):
            return f"{step}: {tasks.first_words(record)}"
        case "checkpoint":
            waited_s = float(record.get("stall_s", duration_s(record)))
            size = readable.size(record.get("bytes") or 0)
            took, waited = readable.duration(duration_s(record)), readable.short(waited_s)
            return f"{step}: checkpoint saved ({size} in {took}; training waited {waited})"
        case "uploaded":
            return f"{step}: checkpoint copied to {record.get('where')}"
        case "checkpoint_failed":
            return f"{step}: checkpoint not saved: {record.get('error')}"
        case "failure":
            return f"failure: {readable.failure(record)}"
        case "epoch" if record.get("left") or set(record.get("joined") or ()) < set(record.get("members") or ()):
            return f"{step}: {readable.epoch(record)}"
        case "hang" if record.get("action") == "wait":  # else the failure says it
            return f"hang: {readable.whom(record)}: {record.get('evidence')}; waiting (guard.on_hang)"
        case "slow":
            return f"slow: {readable.whom(record)}: {record.get('evidence')}; waiting (guard.livelock)"
        case "straggler":
            return f"straggler: {readable.straggler(record)}"
        case "skip":
            numbers = (
                f"loss {readable.number(record.get('loss'))}, gradient norm {readable.number(record.get('grad_norm'))}"
            )
            return f"{step}: batch {record.get('batch')} skipped: {record.get('why')} ({numbers})"
        case "rewind":
            first, last = record.get("batches") or ("?", "?")
            return f"{step}: back to step {record.get('to')}, around batches {first} to {last}: {record.get('why')}"
        case "decision":
            return f"chose {record.get('key')} = {record.get('value')}: {record.get('why')}"
        case "warning":
            return f"warning: {record.get('text')}"
        case "stopping" if record.get("script"):
            return f"told to stop ({record.get('signal')}): so is the script, which may save and leave"
        case "stopping":
            return f"told to stop ({record.get('signal')}): the state is saved first"
        case "close":
            return f"{record.get('status')}: {record.get('reason')}"
    return None


def _started(record: Record) -> str:
    processes = int(record.get("world", 1))
    where = f"{processes} process{'es' if processes > 1 else ''}"
    if script := record.get("script"):
        begin = f"from step {record['step']}" if record.get("step") else "from the beginning"
        begin = f"goes on from {record['path']}" if record.get("path") else begin
        return f"attempt {record.get('attempt', 0)}: {where} of {script}, {begin}"
    where += f" on {record.get('device')}"
    what = f"{readable.count(record.get('params') or 0)} parameters in {record.get('precision')}"
    begin = f"from step {record['step']}" if record.get("step") else "from the beginning"
    shared = f"; {record['sharing']}" if record.get("sharing") else ""
    notes = "".join(f"\nnote: {text}" for text in readable.notes(record))
    return f"attempt {record.get('attempt', 0)}: {where}, {what}, {begin}{shared}{notes}"
