"""For the Trainer of transformers."""

from __future__ import annotations

import os
import time
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from shoal.script.callbacks.telling import Telling


class ShoalTrainerCallback(TrainerCallback):
    """Made by `shoal.trainer_callback`."""

    def __init__(self) -> None:
        self._telling = Telling()
        self._since = time.time()  # the last thing that was told

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._telling.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = time.time()
        if self._telling.stop_asked():
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._telling.logged(state.global_step, logs or {})

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        loss = next((value for name, value in (metrics or {}).items() if name.endswith("loss")), None)
        self._telling.evaluated(state.global_step, loss, self._since)
        self._since = time.time()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self._telling.saved(state.global_step, path, self._since)
        self._since = time.time()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._telling.end()
