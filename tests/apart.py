"""`pytest --apart 2`: each file of tests in a process of its own, several at a time, forked from one that imported all.

A third of what the tests take is waiting, so that there is one file more at a time than cores; which ones, and
when another may run beside them, is for tests/lanes.py to say. And whoever forks must have no threads (a forked child
inherits what they held, not them): libraries start some that never end, so only a process that runs no test stays fit
to be forked. Tests with the mark `alone` come last, with nothing beside them. What a process reports is reported here
as if it had happened here. One that dies is the failure of the test it was in; the rest of its file runs in another.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests import durations
from tests.durations import Took
from tests.forked import fork
from tests.lanes import Idle, Work, next_of, works

COMPILER = ("torch._dynamo.backends.debugging", "torch._inductor.compile_fx", "functorch.compile")
LOOK_S = 1.0  # how often, at least, it is looked whether cores are idle


def run_apart(session: pytest.Session, lanes: int) -> dict[str, Took]:
    """All tests of the session; how long each file took. For `pytest_runtestloop`."""
    config = session.config
    _warm()
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all: none is left behind
    gc.freeze()
    together = [item for item in session.items if not item.get_closest_marker("alone")]
    alone = [item for item in session.items if item.get_closest_marker("alone")]
    known, took = durations.read(), dict[str, Took]()
    for items, most in ((together, lanes), (alone, 1)):
        _Crew(session, works(items, known), most, took).work()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
    return took


def _warm() -> None:
    """What every rank of every file would do first is done once, if there are any; a second of imports for each that
    compiles too."""
    ranks = sys.modules.get("tests.ranks")
    if ranks is None:
        return
    ranks._warm()
    with warnings.catch_warnings(action="ignore"):  # torch's own, about torch
        for name in COMPILER:
            importlib.import_module(name)


class _Crew:
    def __init__(self, session: pytest.Session, waiting: list[Work], lanes: int, took: dict[str, Took]) -> None:
        self._session = session
        self._waiting = waiting
        self._lanes = lanes
        self._idle = Idle()
        self._took = took
        self._at_work: dict[socket.socket, _Process] = {}

    def work(self) -> None:
        try:
            while self._at_work or self._waiting:
                while not self._to_end and (work := self._next()):
                    self._waiting.remove(work)
                    self._start(work)
                if not self._at_work:
                    return
                with selectors.DefaultSelector() as selector:
                    for sock in self._at_work:
                        selector.register(sock, selectors.EVENT_READ)
                    for key, _ in selector.select(LOOK_S if self._waiting else None):
                        self._hear(self._at_work[key.fileobj])  # type: ignore[index]
        finally:
            for process in self._at_work.values():  # Ctrl-C: they have heard it too, and put things away
                os.waitpid(process.pid, 0)

    @property
    def _to_end(self) -> bool:
        return bool(self._session.shouldfail or self._session.shouldstop)

    def _next(self) -> Work | None:
        running = [process.work for process in self._at_work.values()]
        return next_of(self._waiting, running, self._lanes, self._idle.cores())

    def _start(self, work: Work) -> None:
        here, there = socket.socketpair()

        def run() -> int:
            here.close()
            for other in self._at_work:
                other.close()
            _run(self._session, work.items, there)
            return 0

        began = time.monotonic()
        pid = fork(run)
        there.close()
        self._at_work[here] = _Process(pid, here, work, began)

    def _hear(self, process: _Process) -> None:
        for said in process.heard():
            hook = self._session.config.hook
            if said["what"] == "begin":
                process.begun += 1
                hook.pytest_runtest_logstart(nodeid=process.current.nodeid, location=process.current.location)
            elif said["what"] == "report":
                report = hook.pytest_report_from_serializable(config=self._session.config, data=said["report"])
                hook.pytest_runtest_logreport(report=report)
            elif said["what"] == "warning":
                _repeat(hook, said)
            else:
                process.ended = True
        if process.open:
            return
        del self._at_work[process.sock]
        process.sock.close()
        _, status, used = os.wait4(process.pid, 0)
        took = Took(time.monotonic() - process.began, used.ru_utime + used.ru_stime)
        name = process.work.name
        self._took[name] = self._took.get(name, Took(0, 0)) + took
        if not process.ended:
            self._died(process, os.waitstatus_to_exitcode(status))

    def _died(self, process: _Process, status: int) -> None:
        how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        item = process.current
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"the process of {item.path.name} died in this test ({how})",
            when="call",
        )
        self._session.config.hook.pytest_runtest_logreport(report=report)
        if rest := process.work.items[max(process.begun, 1) :]:
            self._waiting.insert(0, replace(process.work, items=rest))


@dataclass
class _Process:
    pid: int
    sock: socket.socket
    work: Work
    began: float
    begun: int = 0
    ended: bool = False
    open: bool = True
    _part: bytes = b""

    @property
    def current(self) -> pytest.Item:
        return self.work.items[max(self.begun - 1, 0)]

    def heard(self) -> Iterator[dict[str, Any]]:
        data = b""
        with contextlib.suppress(ConnectionError):
            data = self.sock.recv(1 << 16)
        self.open = bool(data)
        self._part += data
        while len(self._part) >= 4 and len(self._part) >= (end := 4 + int.from_bytes(self._part[:4], "big")):
            said, self._part = self._part[4:end], self._part[end:]
            yield pickle.loads(said)


def _run(session: pytest.Session, items: list[pytest.Item], sock: socket.socket) -> None:
    """In the forked process."""
    config = session.config
    teller = _Teller(config, sock)
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()  # into files of its own
    terminal: Any = config.pluginmanager.getplugin("terminalreporter")
    terminal._tw._file = open(os.devnull, "w")  # noqa: SIM115  # all is told by whoever forked
    config.pluginmanager.register(teller, "teller")
    teller.listens = True
    try:
        for item, following in zip(items, [*items[1:], None], strict=True):
            teller.tell(what="begin")
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        teller.tell(what="end")
    finally:
        session._setupstate.teardown_exact(None)  # what Ctrl-C left standing


class _Teller:
    """A plugin that passes on what is reported."""

    def __init__(self, config: pytest.Config, sock: socket.socket) -> None:
        self._config = config
        self._sock = sock
        self.listens = False  # while it is registered: the warnings that there were are repeated to a new plugin

    def tell(self, **said: Any) -> None:
        data = pickle.dumps(said)
        self._sock.sendall(len(data).to_bytes(4, "big") + data)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self.tell(what="report", report=said)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if not self.listens:
            return
        w = warning_message
        where = {"when": when, "nodeid": nodeid, "filename": w.filename, "lineno": w.lineno}
        self.tell(what="warning", text=f"{w.category.__name__}: {w.message}", **where)


def _repeat(hook: Any, said: dict[str, Any]) -> None:
    message = warnings.WarningMessage(UserWarning(said["text"]), UserWarning, said["filename"], said["lineno"])
    hook.pytest_warning_recorded.call_historic(
        kwargs={"warning_message": message, "nodeid": said["nodeid"], "when": said["when"], "location": None}
    )
