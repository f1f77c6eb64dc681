"""The connection to an object store: how it is made, and what its errors mean in one sentence.

The address and the keys of an S3 store come from the usual AWS_* environment variables. No error shows a key: what
servers answer is cut down to its code, because some repeat the token that they refuse.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any

from shoal.errors import SetupError, ShoalError, SpecError, TransientError, needs_extra

# Codes of requests that would be refused again, whoever sends them.
_WRONG_KEYS = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
_WRONG_REQUEST = frozenset(
    {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "InvalidArgument", "InvalidBucketName"}
    | {"InvalidRequest", "MethodNotAllowed", "NotImplemented", "PermanentRedirect", "TooManyParts"}
)


def connect(
    url: str,
    holds: str,
    retries: int,
    retry_s: float,
    timeout_s: float,
    stall_s: float | None = None,
    create: bool = False,
    **s3: Any,
) -> Any:
    """An obstore store for s3://bucket/prefix. file:///folder works too: a disk that many machines share.

    Requests are tried again for `retry_s`. One takes at most `timeout_s`, and (`stall_s`) hears nothing for that long.
    `holds` says in an error what is looked for; `create` makes the folder; `s3` are options of an S3 store.
    """
    scheme, _, rest = url.partition("://")
    if "@" in rest.partition("/")[0]:
        raise SpecError(
            f"the address of {holds} has keys in it; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead."
        )
    if scheme not in ("s3", "file") or not rest.strip("/"):
        raise SpecError(f"'{url}' is no place for {holds}; give a folder or s3://bucket/prefix.")
    try:
        from obstore.store import from_url
    except ImportError:
        raise needs_extra("obstore", "s3", f"using {scheme}://") from None
    try:
        if scheme == "file":
            return from_url(url, mkdir=create, automatic_cleanup=True)
        # A store on this machine or in a closed network speaks plain HTTP; nobody writes http:// by accident.
        plain = os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL", "")).startswith("http://")
        client = {"allow_http": plain, "timeout": timedelta(seconds=timeout_s), "connect_timeout": "5s"}
        if stall_s is not None:
            client["read_timeout"] = timedelta(seconds=stall_s)
        return from_url(
            url,
            client_options=client,
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=retry_s),
                "backoff": {
                    "init_backoff": timedelta(seconds=0.2),
                    "max_backoff": timedelta(seconds=min(8, retry_s / 4)),
                    "base": 3,
                },
            },
            **s3,
        )
    except Exception as e:
        raise explained(e, url) from None


def code_of(e: Exception) -> str:
    """What the store calls it, or nothing."""
    code = re.search(r"<Code>(\w+)</Code>", str(e))
    return code.group(1) if code else ""


def is_missing(e: Exception) -> bool:
    """Whether there is no such object (where there is such a bucket)."""
    from obstore import exceptions as obs

    return isinstance(e, FileNotFoundError | obs.NotFoundError) and code_of(e) not in ("NoSuchBucket", "NoSuchUpload")


def past_the_end(e: Exception) -> bool:
    """Whether the object is too short to have the bytes that were asked for."""
    return re.search(r"status code: 416|StartTooLarge", str(e)) is not None


def explained(e: Exception, where: str) -> ShoalError:
    """obstore's many-line errors in one sentence, of the kind that says whether to try again."""
    from obstore import exceptions as obs

    code = code_of(e)
    said = f" (the store says {code})" if code else ""
    if code == "NoSuchBucket":
        return SetupError(f"there is no bucket for {where}; check its name and AWS_ENDPOINT_URL.")
    if "Unable to canonicalize" in str(e):  # only file:// says that
        return SetupError(f"there is no folder for {where}; check the path.")
    refused = isinstance(e, obs.PermissionDeniedError | obs.UnauthenticatedError | PermissionError)
    if refused or code in _WRONG_KEYS or re.search("status code: 40[13]", str(e)):  # a listing has no class for it
        return SetupError(
            f"the store refuses access to {where}{said}; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    if "169.254.169.254" in str(e):
        return SetupError(f"no keys for {where} were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.")
    if code in _WRONG_REQUEST or "incorrectly configured region" in str(e):
        return SetupError(f"the store cannot do what {where} needs{said}; check AWS_ENDPOINT_URL and AWS_REGION.")
    if code == "BadDigest":
        return TransientError(f"what arrived at {where} is not what was sent{said}; check the network and try again.")
    if code == "NoSuchUpload":
        return TransientError(f"{where} has dropped an unfinished upload{said}; try again.")
    if timed_out(e):
        return TransientError(f"{where} does not answer in time; check AWS_ENDPOINT_URL and the network.")
    # The first line is "what was tried in how long, after n retries - what went wrong", then perhaps the answer's body.
    first = (str(e).splitlines() or [type(e).__name__])[0].rpartition(" - ")[2]
    reason = re.sub(r"<.*|\(?\w+://\S+", "", first).strip().rstrip(".:")
    return TransientError(f"{where} cannot be reached{said}: {reason}; check AWS_ENDPOINT_URL and the network.")


def timed_out(e: Exception) -> bool:
    return "kind: Timeout" in str(e)
