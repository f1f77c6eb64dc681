"""The connection to an object store: how it is made, and what its errors mean in one sentence.

The address and the keys of an S3 store come from the usual AWS_* environment variables.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any

from shoal.data.index import INDEX_FILE
from shoal.errors import DataError, SetupError, ShoalError, SpecError, TransientError, needs_extra


def connect(url: str, retries: int, create: bool = False) -> Any:
    """An obstore store for s3://bucket/prefix. file:///folder works too: a disk that many machines share."""
    scheme, _, rest = url.partition("://")
    if scheme not in ("s3", "file") or not rest.strip("/"):
        raise SpecError(f"'{url}' is no place for a data set; give a folder or s3://bucket/prefix.")
    try:
        from obstore.store import from_url
    except ImportError:
        raise needs_extra("obstore", "s3", f"reading {scheme}://") from None
    try:
        if scheme == "file":
            return from_url(url, mkdir=create)
        # A store on this machine or a closed network speaks plain HTTP; nobody writes http:// by accident.
        plain = os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL", "")).startswith("http://")
        return from_url(
            url,
            client_options={"allow_http": plain, "timeout": "120s", "connect_timeout": "5s"},
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=120),
                "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=8), "base": 3},
            },
        )
    except Exception as e:
        raise explained(e, url, "") from None


def get(store: Any, where: str, name: str) -> bytes:
    import obstore

    try:
        return bytes(obstore.get(store, name).bytes())
    except Exception as e:
        raise explained(e, where, name) from None


def past_the_end(e: Exception) -> bool:
    """Whether the object is too short to have the bytes that were asked for."""
    return re.search(r"\b416\b|StartTooLarge", str(e)) is not None


def explained(e: Exception, where: str, name: str) -> ShoalError:
    """obstore's many-line errors in one sentence, of the kind that says whether to try again."""
    from obstore import exceptions as obs

    code = re.search(r"<Code>(\w+)</Code>", str(e))
    said = f" (the store says {code.group(1)})" if code else ""
    if isinstance(e, FileNotFoundError | obs.NotFoundError):
        if code and code.group(1) == "NoSuchBucket":
            return DataError(f"there is no bucket for {where}; check its name and AWS_ENDPOINT_URL.")
        if name == INDEX_FILE:
            return DataError(f"there is no data set at {where}: it has no {INDEX_FILE}; check the prefix or upload it.")
        return DataError(f"{where}/{name} is missing; upload the data set again.")
    if isinstance(e, obs.PermissionDeniedError | obs.UnauthenticatedError | PermissionError):
        return SetupError(
            f"the store refuses access to {where}{said}; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    if "Unable to canonicalize" in str(e):  # only file:// says that
        return DataError(f"there is no folder for {where}; check the path.")
    if "169.254.169.254" in str(e):
        return SetupError(f"no keys for {where} were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.")
    # The first line is "what was tried in how long, after n retries - what went wrong".
    reason = (str(e).splitlines() or [type(e).__name__])[0].rpartition(" - ")[2].strip().rstrip(".")
    return TransientError(f"{where} cannot be reached{said}: {reason}; check AWS_ENDPOINT_URL and the network.")
