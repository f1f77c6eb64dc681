"""The losses that a script gives to `backward`, read without making the device wait: those on a device are copied to
pinned memory and looked at a step later."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

MOST_WAITING = 64  # steps; a device that is further behind is not asked about the oldest

Value = float | tuple[Any, Any]  # of the host; or a copy that is under way, and the event after it


class Losses:
    """Of one rank. A step's loss is the sum of what its micro-batches have given: that is what its gradient is of."""

    def __init__(self) -> None:
        self._torch: Any = None
        self._given: list[Value] = []  # in the step under way
        self._waiting: deque[tuple[int, list[Value], dict[str, Any]]] = deque()
        self._scaled: tuple[Any, Any] | None = None  # what a gradient scaler has made, and of what

    def hook(self, torch: Any) -> None:
        self._torch = torch
        scaler = torch.amp.GradScaler
        original = scaler.scale

        def scale(scaler: Any, outputs: Any) -> Any:
            made = original(scaler, outputs)
            if isinstance(outputs, torch.Tensor) and made is not outputs:
                self._scaled = weakref.ref(made), outputs.detach()
            return made

        scaler.scale = scale

    def given(self, loss: Any) -> None:
        if self._scaled is not None and self._scaled[0]() is loss:
            loss = self._scaled[1]
        self._scaled = None
        if loss.numel() != 1:
            self._given.append(math.nan)
        elif loss.device.type == "cpu":
            self._given.append(float(loss.detach()))
        elif loss.device.type == "cuda" and not self._torch.cuda.is_current_stream_capturing():
            copy = self._torch.empty((), dtype=loss.dtype, pin_memory=True)
            copy.copy_(loss.detach().reshape(()), non_blocking=True)
            event = self._torch.cuda.Event()
            event.record()
            self._given.append((copy, event))
        else:  # another device, which might be waited for
            self._given.append(math.nan)

    def stepped(self, step: int, about: dict[str, Any]) -> None:
        about["micro_batches"] = len(self._given)
        self._waiting.append((step, self._given, about))
        self._given = []

    def known(self, last: bool = False) -> Iterator[tuple[int, float, dict[str, Any]]]:
        """Of the steps whose losses have come, in their order. `last`: of all of them."""
        while self._waiting:
            step, given, about = self._waiting[0]
            given = [_read(value) for value in given]
            there = all(isinstance(value, float) for value in given)
            if not there and not last and len(self._waiting) <= MOST_WAITING:
                self._waiting[0] = (step, given, about)
                return
            self._waiting.popleft()
            loss = sum(v if isinstance(v, float) else math.nan for v in given) if given else math.nan
            yield step, loss, about


def _read(value: Value) -> Value:
    return float(value[0]) if isinstance(value, tuple) and value[1].query() else value
