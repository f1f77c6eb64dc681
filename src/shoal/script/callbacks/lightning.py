"""For Lightning's Trainer: of the package `lightning`, or of `pytorch_lightning`, whichever the script uses."""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from typing import Any

from shoal.script.callbacks.telling import Telling


def make_callback() -> Any:
    """The two packages have a class each, and each Trainer knows only its own."""
    both = ("lightning.pytorch", "pytorch_lightning")
    package = next((name for name in both if name in sys.modules), both[0])
    return type("ShoalCallback", (_Callback, import_module(package).Callback), {})()


class _Callback:
    def __init__(self) -> None:
        self._telling, self._known = Telling(), set[str]()
        self._validates = time.time()
        self._save = (0, 0.0)  # at which step the newest was begun, and when

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._telling.begin()
        self._known |= set(_saved(trainer))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._tell(trainer)
        if self._telling.stop_asked():
            place = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
            path = os.path.join(place, f"stopped-{trainer.global_step}.ckpt")
            trainer.save_checkpoint(path)
            self._telling.saved(self._save[0], path, self._save[1])
            trainer.should_stop = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._validates = time.time()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        found = {name: value for name, value in trainer.callback_metrics.items() if "val" in name and "loss" in name}
        self._telling.evaluated(trainer.global_step, next(iter(found.values()), None), self._validates)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._save = trainer.global_step, time.time()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._tell(trainer)
        self._telling.end()

    def _tell(self, trainer: Any) -> None:
        self._telling.logged(trainer.global_step, trainer.logged_metrics)
        for path in _saved(trainer):
            if path not in self._known:  # Lightning saves after other callbacks: told of at the next batch
                self._known.add(path)
                self._telling.saved(self._save[0], path, self._save[1])


def _saved(trainer: Any) -> list[str]:
    """What its ModelCheckpoints have saved last."""
    paths = [
        getattr(one, name, "")
        for one in trainer.checkpoint_callbacks
        for name in ("best_model_path", "last_model_path")
    ]
    return [path for path in paths if path]
