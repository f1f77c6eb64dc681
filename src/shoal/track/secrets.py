"""Nothing secret reaches the journal, a log or a tracker: credentials inside addresses are masked.

Addresses are where secrets hide in a training run: `http://user:password@host` in a run file or on the command line,
signed object-store links, tokens in a query. Environment variables are never written anywhere, so they need no mask.
"""

from __future__ import annotations

import re

_USERINFO = re.compile(r"(\w[\w+.-]*://)[^/\s'\"]+@")
_NAMES = r"[\w-]*(?:token|secret|password|signature|credential|api[_-]?key)|sig|key|auth|passwd"
_QUERY = re.compile(rf"([?&;](?:{_NAMES})=)[^&;\s'\"#]+", re.IGNORECASE)


def mask(text: str) -> str:
    """The text with every credential inside an address replaced by `***`."""
    if "://" not in text:  # almost every string: keep the cost of a journal line near zero
        return text
    return _QUERY.sub(r"\1***", _USERINFO.sub(r"\1***@", text))
