"""What a run is: the typed run file, presets, overrides, JSON schema. Imports nothing of ours but errors."""

from shoal.spec.resolve import Loaded, load
from shoal.spec.run import Run
from shoal.spec.write import dump

__all__ = ["Loaded", "Run", "dump", "load"]
