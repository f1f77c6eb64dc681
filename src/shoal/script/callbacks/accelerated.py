"""For Accelerate, whose loop is the script's own."""

from __future__ import annotations

import time
from typing import Any

from accelerate.tracking import GeneralTracker, on_main_process

from shoal.script.callbacks.telling import Telling


class Followed:
    """Made by `shoal.follow_accelerator`."""

    def __init__(self, accelerator: Any) -> None:
        self._telling = Telling()
        self._save: tuple[str, float] | None = None  # that was begun: where, and when
        self._step = 0
        accelerator.trackers.append(_Tracker(self))
        accelerator.register_save_state_pre_hook(self._before_save)
        self._telling.begin()

    def stop_asked(self, step: int) -> bool:
        """At the end of each step, after a save, on every rank."""
        self._step = step
        self._after_save()
        return self._telling.stop_asked()

    def end(self) -> None:
        """`accelerator.end_training` calls it."""
        self._after_save()
        self._telling.end()

    def logged(self, step: int, values: dict[str, Any]) -> None:
        self._telling.logged(step, values)

    def _before_save(self, models: Any, weights: Any, output_dir: str) -> None:
        self._after_save()
        self._save = str(output_dir), time.time()

    def _after_save(self) -> None:
        """Accelerate calls nobody when a save has ended: it is told of afterwards."""
        if self._save is not None:
            path, began = self._save
            self._save = None
            self._telling.saved(self._step, path, began)


class _Tracker(GeneralTracker):
    name = "shoal"
    requires_logging_directory = False

    def __init__(self, followed: Followed) -> None:
        super().__init__()
        self._followed = followed

    @property
    def tracker(self) -> Followed:
        return self._followed

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._followed.logged(step or 0, values)

    def finish(self) -> None:
        self._followed.end()
