"""The probe inside a rank of somebody's script: its steps, losses and saves, without an edit, and no bit changed.

It begins before the script does (`probe_path/sitecustomize.py`) and hooks torch once that has been imported. It marks
the pulse that the supervisor watches; that of rank 0 writes `step` and `checkpoint` records to the journal. A defect of
the probe must not end a training: it says so once and is silent from then on. A forked child has none.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.journal import collectives
from shoal.journal.pulse import Pulse
from shoal.script.after_import import after_import
from shoal.script.atomic_save import Saver
from shoal.script.losses import Losses
from shoal.script.recorder import Recorder

RUN, FIRST_STEP = "SHOAL_SCRIPT", "SHOAL_PROBE_STEP"  # the run directory; the steps that were taken before
MEASURED = "SHOAL_PROBE_MEASURED"  # `shoal adopt`: `steps`, a record of each; `kill`, and the end after a save
MARKS = 1024  # of a step, at most: so that the marks of ranks compare, whatever each has done in a step
MOST_KEYS = 32  # of a checkpoint, in the journal


def begin_here() -> Probe:
    run, rank = Path(os.environ[RUN]), int(os.environ.get("RANK", "0"))
    attempt, first = int(os.environ.get("SHOAL_ATTEMPT", "0")), int(os.environ.get(FIRST_STEP, "0"))
    measured = os.environ.get(MEASURED)
    recorder = Recorder(run / "journal.jsonl", attempt, each=measured is not None) if rank == 0 else None
    probe = Probe(Pulse.begin(), recorder, Saver(f"{run.name}-{rank}"), first, measured == "kill" and not attempt)
    os.register_at_fork(after_in_child=probe.off)
    atexit.register(probe.end)
    after_import("torch", probe.hook)
    return probe


class Probe:
    def __init__(
        self, pulse: Pulse, recorder: Recorder | None, saver: Saver, first_step: int, killed: bool = False
    ) -> None:
        """`killed`: in the step after the first save that follows a step."""
        self._pulse, self._recorder, self._saver, self._first = pulse, recorder, saver, first_step
        self._killed, self._has_saved = killed, False
        self._on, self._main = True, threading.main_thread().ident
        self._leads: weakref.ref[Any] | None = None  # the optimizer whose steps count
        self._since: weakref.WeakSet[Any] = weakref.WeakSet()  # others that have taken one since its last
        self._steps = self._micro = self._depth = 0
        self._began = time.time()
        self._losses = Losses() if recorder else None

    def off(self) -> None:
        self._on = False

    def end(self) -> None:
        if self._on and self._recorder:
            self._guarded(lambda: self._flush(last=True))
            self._guarded(self._recorder.rest)

    def hook(self, torch: ModuleType) -> None:
        self._guarded(lambda: self._hook(torch))

    def _hook(self, torch: Any) -> None:
        optimizer = importlib.import_module("torch.optim.optimizer")
        tensor, serialization = torch.Tensor, torch.serialization
        optimizer.register_optimizer_step_pre_hook(self._before_step)
        optimizer.register_optimizer_step_post_hook(self._after_step)
        tensor.backward = self._with_backward(tensor.backward)
        torch.save = serialization.save = self._with_save(torch.save)
        if self._losses:
            self._losses.hook(torch)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            rank = int(os.environ.get("RANK", "0"))
            self._pulse.watch_groups(lambda: _begun(rank))

    def _with_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._on or self._depth or threading.get_ident() != self._main:
                return original(tensor, *args, **kwargs)
            self._guarded(lambda: self._before_backward(tensor))
            self._depth += 1
            try:
                return original(tensor, *args, **kwargs)
            finally:
                self._depth -= 1
                self._mark("forward")

        return backward

    def _with_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._on or not isinstance(f, str | os.PathLike) or isinstance(path := os.fspath(f), bytes):
                return original(obj, f, *args, **kwargs)
            began = time.time()
            self._mark("save")
            try:
                done = self._saver.save(lambda file: original(obj, file, *args, **kwargs), path)
            finally:
                self._mark("forward")
            self._guarded(lambda: self._saved(obj, path, began))
            return done

        return save

    def _before_backward(self, tensor: Any) -> None:
        self._micro += 1
        first = not self._steps and self._micro == 1
        if first:
            self._began = time.time()  # what was before it is no step: imports, data, the model
        self._mark("backward", step=self._step if first else None)
        if self._losses:
            self._losses.given(tensor)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._on:
            self._mark("optimizer")

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Several optimizers may take turns: of those the steps of the one that takes the most count."""
        if not self._on:
            return
        leads = self._leads() if self._leads else None
        if leads is not None and leads is not optimizer and optimizer not in self._since:
            self._since.add(optimizer)
            self._mark("forward")
            return
        if leads is not optimizer:
            self._leads = weakref.ref(optimizer)
        self._since.clear()
        self._steps, self._micro = self._steps + 1, 0
        self._mark("forward", step=self._step)
        if self._recorder and self._losses:
            self._guarded(lambda: self._record(optimizer))
            if self._killed and self._has_saved:
                self.end()
                os.kill(os.getpid(), signal.SIGKILL)

    @property
    def _step(self) -> int:
        return self._first + self._steps

    def _mark(self, phase: str, step: int | None = None) -> None:
        self._pulse.mark(phase, step, self._step * MARKS + min(2 * self._micro, MARKS - 1))

    def _record(self, optimizer: Any) -> None:
        assert self._losses
        now = time.time()
        self._losses.stepped(self._step, {"t": now, "begin": self._began, **_rate(optimizer)})
        self._began = now
        self._flush()

    def _flush(self, last: bool = False) -> None:
        assert self._recorder is not None
        assert self._losses is not None
        for step, loss, about in self._losses.known(last):
            self._recorder.step(step, loss, about)

    def _saved(self, obj: object, path: str, began: float) -> None:
        if not self._micro:
            self._began = time.time()  # of the step that comes
        if not self._recorder:
            return
        self._has_saved = self._steps > 0
        keys = [str(key)[:100] for key in list(obj)[:MOST_KEYS]] if isinstance(obj, dict) else []
        self._recorder.saved(self._step, os.path.abspath(path), began, keys)

    def _guarded(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as e:
            self.off()
            print(f"shoal: the probe ends ({type(e).__name__}: {e}); the script goes on", file=sys.stderr)


def _rate(optimizer: Any) -> dict[str, float]:
    """Where it is a plain number: one on a device would have to be waited for."""
    rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return {"lr": float(rate)} if isinstance(rate, float | int) else {}


def _begun(rank: int) -> dict[str, int]:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return {} if c10d is None else collectives.begun(c10d, rank, {})
