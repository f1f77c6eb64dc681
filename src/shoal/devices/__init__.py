"""Which accelerators this machine has: how many, whose, their names, memory and places on the bus. The one place that
asks; drivers' files and tools alone, never torch (but for `on_torch`), so that nobody starts a GPU by looking."""

from shoal.devices.gpu import Gpu
from shoal.devices.here import gpus, problem, visible_gpus

__all__ = ["Gpu", "gpus", "problem", "visible_gpus"]
