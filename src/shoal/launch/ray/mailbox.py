"""Words for a job's driver that must not be seen in Ray's lists: they lie in the cluster's own key-value store.

A job's environment is shown to whoever can list jobs and written to logs on every node. The store is filled through
the same HTTP API as packages of code are; the driver takes the secrets out as it starts.
"""

from __future__ import annotations

SECRETS = "secrets"
AT_ONCE = "now"


def package(kind: str, job: str) -> str:
    """The name under /api/packages/gcs/."""
    return f"_shoal_{kind}_{job}.zip"


def key(kind: str, job: str) -> bytes:
    """The same, as the driver finds it."""
    return f"gcs://{package(kind, job)}".encode()
