"""Shoal: one run file that plans, launches, trains, survives, tracks and evaluates a language model.

What a program may import stands in `NAMES`, and in docs/reference/api.md; each is loaded when it is first asked for, so
that `import shoal` costs nothing. Everything else in the package may change without a word.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shoal.api import checkpoints as checkpoints
    from shoal.api import launch_run as launch_run
    from shoal.api import load as load
    from shoal.api import make_model as make_model
    from shoal.api import read_checkpoint as read_checkpoint
    from shoal.api import session as session
    from shoal.api import train_run as train_run
    from shoal.api import windows as windows
    from shoal.data.windows import Batch as Batch
    from shoal.errors import ShoalError as ShoalError
    from shoal.model.decoder import Block as Block
    from shoal.model.decoder import Decoder as Decoder
    from shoal.model.objective import Objective as Objective
    from shoal.script.attach import Attached as Attached
    from shoal.script.attach import attach as attach
    from shoal.script.callbacks import follow_accelerator as follow_accelerator
    from shoal.script.callbacks import lightning_callback as lightning_callback
    from shoal.script.callbacks import trainer_callback as trainer_callback
    from shoal.spec.run import Run as Run
    from shoal.train.hooks import Hook as Hook
    from shoal.train.hooks import Moment as Moment
    from shoal.train.optim import Optimizers as Optimizers
    from shoal.train.session import Session as Session

NAMES = {
    "load": "shoal.api",
    "Run": "shoal.spec.run",
    "session": "shoal.api",
    "Session": "shoal.train.session",
    "Hook": "shoal.train.hooks",
    "Moment": "shoal.train.hooks",
    "Batch": "shoal.data.windows",
    "Objective": "shoal.model.objective",
    "Block": "shoal.model.decoder",
    "Decoder": "shoal.model.decoder",
    "Optimizers": "shoal.train.optim",
    "make_model": "shoal.api",
    "checkpoints": "shoal.api",
    "read_checkpoint": "shoal.api",
    "windows": "shoal.api",
    "train_run": "shoal.api",
    "launch_run": "shoal.api",
    "attach": "shoal.script.attach",
    "Attached": "shoal.script.attach",
    "trainer_callback": "shoal.script.callbacks",
    "lightning_callback": "shoal.script.callbacks",
    "follow_accelerator": "shoal.script.callbacks",
    "ShoalError": "shoal.errors",
}
__all__ = ["NAMES", "__version__", *NAMES]


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module 'shoal' has no attribute '{name}'; docs/reference/api.md lists what it has")
    return getattr(import_module(NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
