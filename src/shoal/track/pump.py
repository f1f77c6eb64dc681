"""Moves a journal to one destination: reads, uploads, remembers how far; when that fails, says so once and goes on.

One thread a destination, so that a server that hangs holds back nobody but itself.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from shoal.errors import SetupError
from shoal.journal.journal import read
from shoal.journal.rundir import RunDir
from shoal.journal.tail import REMARKS
from shoal.masking import mask
from shoal.track.about import About
from shoal.track.cursor import Cursor, alone
from shoal.track.destination import Destination
from shoal.track.events import Event, Reader

FLUSH_EVERY_S = 5.0  # between uploads: small requests cost more CPU than late ones cost a reader
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0
HURRY_BACKOFF_S = 1.0  # once the run has ended there is little time left


class Pump(threading.Thread):
    """`ending()` says that no more records will come; `hurry` is set at that moment to cut every wait short."""

    def __init__(
        self,
        run_dir: RunDir,
        destination: Destination,
        about: About,
        ending: Callable[[], str | None],
        hurry: threading.Event,
        say: Callable[[str], None],
        log: Callable[[str], None],
        tries: int | None = None,
    ) -> None:
        super().__init__(name=f"to-{destination.name}", daemon=True)
        self._run_dir, self._to, self._about = run_dir, destination, about
        self._ending, self._hurry, self._say, self._log = ending, hurry, say, log
        self._tries = tries
        self._cursor = Cursor.load(run_dir, destination.name, destination.address)
        self._reader = Reader(run_dir.journal_file)
        self._pending: list[Event] = []
        self.failing = ""  # why nothing arrives, while nothing arrives
        self.said = False
        self.complete = False

    @property
    def label(self) -> str:
        return self._to.label

    @property
    def behind_bytes(self) -> int:
        return max(0, self._run_dir.journal_file.stat().st_size - self._cursor.offset)

    def _news(self) -> bool:
        """Whether there is anything to upload: what was remarked after the end of a session is not, but for what
        `shoal eval` has measured."""
        after = read(self._run_dir.journal_file, self._cursor.offset)
        return any(record.get("kind") not in REMARKS or record.get("kind") == "evaluated" for record, _ in after)

    def run(self) -> None:
        while not self._hurry.is_set():
            with alone(self._run_dir, self._to.name) as mine:
                if mine:
                    self._cursor = Cursor.load(self._run_dir, self._to.name, self._to.address)
                    if self._tries is not None and not self._news():
                        self.complete = True  # nothing to upload is no reason to load a client and connect
                        return
                    self._keep_trying()
                    return
                if self._tries is not None:
                    self.failing = "another process is uploading this run right now"
                    return
            self._hurry.wait(FLUSH_EVERY_S)  # the mirror of the session before us is still at it

    def _keep_trying(self) -> None:
        failures = 0
        while True:
            offset_before = self._cursor.offset
            try:
                self._follow()
                return
            except SetupError as e:  # a missing package will not appear by waiting
                self._fail(str(e).rstrip("."), hopeless=True)
                return
            except Exception as e:  # whatever a third-party client throws must not end the mirror
                failures = 1 if self._cursor.offset > offset_before else failures + 1
                self._fail(reason(e))
            if self._tries is not None and failures >= self._tries:
                return
            longest_s = HURRY_BACKOFF_S if self._hurry.is_set() else LONGEST_BACKOFF_S
            backoff_s = min(FIRST_BACKOFF_S * 2 ** (failures - 1), longest_s)
            if self._hurry.is_set():
                time.sleep(backoff_s)
            else:
                self._hurry.wait(backoff_s)

    def _follow(self) -> None:
        """One connection: from opening it until the run has ended and all of it has arrived."""
        expected = self._cursor.offset
        self._to.open(self._about, self._cursor)
        if self._reader.offset == 0 or self._cursor.offset != expected:
            self._reader, self._pending = Reader(self._run_dir.journal_file), []
            self._reader.skip_to(self._cursor.offset)
        while True:
            ended = self._ending()  # asked before reading: what is written later belongs to the next session
            if not self._pending:
                self._pending = self._reader.batch(self._to.most_values)
            if self._reader.offset > self._cursor.offset:
                if self._pending:
                    self._to.send(self._pending, self._cursor)
                full = sum(len(event.values) for event in self._pending) >= self._to.most_values
                self._pending, self._cursor.offset = [], self._reader.offset
                if self._to.durable:
                    self._cursor.save()
                self._recover()
                if full or ended:
                    continue
            elif ended:
                if ended == "dead":  # no record says that it ended, for nobody was left to write one
                    self._to.send([Event("close", time.time(), note="dead")], self._cursor)
                self._to.finish()
                self._cursor.save()
                self.complete, self.failing = True, ""
                self._log(f"{self.label}: everything is uploaded.")
                return
            self._hurry.wait(FLUSH_EVERY_S)

    def _fail(self, why: str, hopeless: bool = False) -> None:
        if why != self.failing:
            self._log(f"{self.label}: {why}.")
        self.failing = why
        if not self.said:
            self.said = True
            later = f"the metrics are kept and `shoal track sync {self._run_dir.name}` uploads them later"
            self._say(f"{self.label}: {why}. Training goes on; {later}.")
        if hopeless:
            self._log(f"{self.label}: given up for this session.")

    def _recover(self) -> None:
        if self.failing:
            self._log(f"{self.label}: answers again.")
            self.failing = ""


def reason(error: BaseException) -> str:
    """What a client's exception means, in a few words and without secrets."""
    text = " ".join(str(part) for part in (error, error.__cause__ or ""))
    status = re.search(r"(?:error code|status(?: code)?|HTTP|too many)[ :=]*(\d{3})\b", text)
    if re.search(r"Connection refused|ConnectionRefused", text):
        return "connection refused"
    if re.search(r"timed? ?out|TimeoutError|deadline", text, re.IGNORECASE) or isinstance(error, TimeoutError):
        return "no answer in time"
    if re.search(r"Name or service not known|getaddrinfo|NameResolution|nodename nor servname", text):
        return "the host's name is unknown"
    if status:
        meaning = {"401": " (not logged in)", "403": " (not allowed)", "404": " (no such service)"}.get(status[1], "")
        return f"HTTP {status[1]}{meaning}"
    first_line = mask(text.strip()).splitlines()[0] if text.strip() else ""
    return f"{type(error).__name__}: {first_line[:200].rstrip('. ')}"
