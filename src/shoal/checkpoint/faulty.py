"""What is wrong with a checkpoint itself, in one class that everybody knows."""

from __future__ import annotations

from shoal.errors import CheckpointError


class Corrupt(CheckpointError):
    """This checkpoint is damaged or incomplete; an older one may be good."""
