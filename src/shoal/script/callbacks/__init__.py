"""One line in a script of a framework: its losses, evaluations and saves go to the run's journal, and `shoal stop`
saves at the next step.

    Trainer(…, callbacks=[shoal.trainer_callback()])          transformers, TRL
    lightning.Trainer(…, callbacks=[shoal.lightning_callback()])
    follow = shoal.follow_accelerator(accelerator)            Accelerate, whose loop is the script's own

Steps, and the marks by which a hang is found, come from the probe. A framework is imported only by who asks for its
callback. Outside of `shoal run` they do nothing.
"""

from __future__ import annotations

from typing import Any


def trainer_callback() -> Any:
    """A callback for the Trainer of transformers (and TRL): what it logs, evaluates and saves is told to the run. Told
    to stop, it saves after the step under way and ends the training."""
    from shoal.script.callbacks.hf import ShoalTrainerCallback

    return ShoalTrainerCallback()


def lightning_callback() -> Any:
    """A callback for Lightning's Trainer: what is logged, validated and saved is told to the run. Told to stop, it
    saves after the step under way, as `stopped-STEP.ckpt` beside the other checkpoints, and ends the training."""
    from shoal.script.callbacks.lightning import make_callback

    return make_callback()


def follow_accelerator(accelerator: Any) -> Any:
    """Of an Accelerator: what `accelerator.log` is given and where `accelerator.save_state` saves is told to the run.
    Ask `.stop_asked(step)` at the end of each step, on every rank; where it is true, save and leave the loop."""
    from shoal.script.callbacks.accelerated import Followed

    return Followed(accelerator)
