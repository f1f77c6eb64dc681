"""Findings that are known and not mended yet: (reader, place). To be empty: what stands here is somebody's open work.

`python -m tests.fuzz` marks them as known and does not fail for them. Take an entry out with the mend.
"""

from __future__ import annotations

KNOWN: frozenset[tuple[str, str]] = frozenset()
