"""Data sets on an object store: the connection, and its errors in the words of somebody who looks for data."""

from __future__ import annotations

from typing import Any

from shoal import objects
from shoal.data.index import INDEX_FILE
from shoal.errors import DataError, ShoalError


def connect(url: str, retries: int, create: bool = False) -> Any:
    """An obstore store for s3://bucket/prefix. file:///folder works too: a disk that many machines share."""
    return objects.connect(url, "a data set", retries, retry_s=120, timeout_s=120, create=create)


def get(store: Any, where: str, name: str) -> bytes:
    import obstore

    try:
        return bytes(obstore.get(store, name).bytes())
    except Exception as e:
        raise explained(e, where, name) from None


def explained(e: Exception, where: str, name: str) -> ShoalError:
    if objects.is_missing(e):
        if name == INDEX_FILE:
            return DataError(f"there is no data set at {where}: it has no {INDEX_FILE}; check the prefix or upload it.")
        return DataError(f"{where}/{name} is missing; upload the data set again.")
    return objects.explained(e, where)
