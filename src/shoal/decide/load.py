"""A run file, read as a person means it: as by `shoal.spec.load`, and `model.weights` may name a checkpoint of ours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from shoal.spec import resolve


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> resolve.Loaded:
    return resolve.load(path, overrides, _shape_of_checkpoint)


def _shape_of_checkpoint(weights: str) -> dict[str, Any] | None:
    from shoal.checkpoint.foreign.shapes import fields_of_weights  # most run files name none

    return fields_of_weights(weights)


def load_text(text: str, path: str | os.PathLike[str]) -> resolve.Loaded:
    """The same of a text that may be written to `path`."""
    return resolve.of_text(text, path, _shape_of_checkpoint)
