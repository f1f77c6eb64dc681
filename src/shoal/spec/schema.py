"""The JSON schema of a run file, for editors: completion, hover texts and red lines while one types."""

from __future__ import annotations

import json
from typing import Any

from shoal.spec.run import Run


def schema() -> dict[str, Any]:
    """Draft 7, the newest that the common YAML language server reads in full."""
    found = Run.model_json_schema(mode="validation")
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **_draft7(found),
        "title": "Shoal run file",
    }


def schema_text() -> str:
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def _draft7(node: Any) -> Any:
    """Pydantic writes draft 2020-12. Two things differ for us: pairs, and what may stand beside a `$ref`."""
    if isinstance(node, list):
        return [_draft7(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _draft7(item) for key, item in node.items()}
    pair = node.pop("prefixItems", None)
    if pair:
        node["items"] = pair[0]  # our only pairs hold two of the same kind
    if "$ref" in node and len(node) > 1:
        node["allOf"] = [{"$ref": node.pop("$ref")}]  # draft 7 ignores everything beside a $ref
    return node
