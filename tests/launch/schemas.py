"""Kubernetes' own schemas, strictly and without a cluster: a misspelt field is refused, as the API server would."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import kubernetes_validate

VERSIONS = ("1.34", "1.35", "1.36", "1.37")  # those that are supported in 2026-11


class Wrong(AssertionError):
    pass


def validate(document: dict[str, Any]) -> None:
    if document["kind"] == "JobSet":
        _validate_jobset(document)
        return
    _validate(json.dumps(document))


@functools.cache  # most variants share most of their documents
def _validate(text: str) -> None:
    document = json.loads(text)
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as e:
            raise Wrong(f"{document['kind']} for {version}: {e}") from e


def _validate_jobset(document: dict[str, Any]) -> None:
    """By the models that Kubeflow generates from JobSet's types, which drop what they do not know; the Jobs inside by
    Kubernetes' schemas."""
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    read = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(document))
    assert read is not None
    _nothing_lost(document, read.to_dict(), "JobSet")
    for group in document["spec"]["replicatedJobs"]:
        validate({"apiVersion": "batch/v1", "kind": "Job", **group["template"]})


def _nothing_lost(asked: Any, kept: Any, where: str) -> None:
    if isinstance(asked, dict):
        if lost := sorted(set(asked) - set(kept)):
            raise Wrong(f"{where} has no field {', '.join(lost)}")
        for key, value in asked.items():
            _nothing_lost(value, kept[key], f"{where}.{key}")
    elif isinstance(asked, list):
        for i, value in enumerate(asked):
            _nothing_lost(value, kept[i], f"{where}[{i}]")
    elif asked != kept:
        raise Wrong(f"{where} is {kept!r} and not {asked!r}")
