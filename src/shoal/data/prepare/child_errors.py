"""Errors of a child process as JSON, so that its parent can raise them as its own."""

from __future__ import annotations

import traceback
from typing import Any

from shoal import errors
from shoal.errors import ShoalError


def from_error(e: Exception) -> dict[str, Any]:
    """One of ours is for the user to read; anything else is a defect, and comes with its traceback."""
    detail = "" if isinstance(e, ShoalError) else "".join(traceback.format_exception(e))
    return {"error": type(e).__name__, "message": str(e), "traceback": detail}


def to_error(message: dict[str, Any]) -> Exception:
    kind = getattr(errors, message["error"], None)
    if isinstance(kind, type) and issubclass(kind, ShoalError):
        return kind(message["message"])
    unexpected = RuntimeError(f"{message['error']}: {message['message']}")
    unexpected.add_note(message["traceback"])
    return unexpected
