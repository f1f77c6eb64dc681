"""Garbage is collected by hand: at the same step on every rank, and at no other time.

Left to itself Python looks for cycles whenever enough objects were made: on each rank at another moment, in the midst
of launching a step, and all others wait. A thousand ranks that pause for 50 ms now and then pause at nearly every step.
What is there when training begins (the model, torch itself) is looked at once and never again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY_STEPS = 50  # what cycles hold is held until then; a step's hold no activations, and a test says so


@contextmanager
def by_hand() -> Iterator[None]:
    """Around training: nothing is collected but by `after`."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def after(step: int) -> None:
    """So many steps are taken. The number decides, not the time: it is the same on all ranks."""
    if step % EVERY_STEPS == 0:
        gc.collect()
