"""The JSON schema and the reference page say what the spec says, and are the ones in the repository."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.init import templates
from shoal.spec.names import names
from shoal.spec.reference import pages
from shoal.spec.schema import schema
from shoal.spec.yaml_text import parse
from tests.patience import limit
from tests.spec.json_schema import accepts

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("page", pages())
def test_the_committed_page_is_up_to_date(page: str) -> None:
    committed = (REPOSITORY / "docs" / "reference" / page).read_text(encoding="utf-8")
    assert committed == pages()[page], "run `python -m shoal.spec.reference`"


def test_the_pages_can_be_written_anywhere(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "shoal.spec.reference", str(tmp_path)],
        check=True,
        capture_output=True,
        timeout=limit(60),
    )
    assert {file.name for file in tmp_path.iterdir()} == set(pages())


def followed(node: dict[str, Any]) -> dict[str, Any]:
    return dict(schema()["$defs"][node["$ref"].removeprefix("#/$defs/")] if "$ref" in node else node)


def described(node: dict[str, Any], path: str = "") -> set[str]:
    """Every dotted name in the schema; each must have a description."""
    found: set[str] = set()
    for option in [node, *node.get("anyOf", []), *node.get("allOf", [])]:
        if "items" in option:
            found |= described(option["items"], f"{path}*.")
        for key, inner in followed(option).get("properties", {}).items():
            assert followed(inner).get("description"), path + key
            found |= {path + key} | described(inner, f"{path}{key}.")
    return found


def test_every_name_of_the_spec_is_in_the_schema_and_on_the_page_with_its_description() -> None:
    page = pages()["run-file.md"]
    wanted = {name.dotted for name in names() if name.path[-1] != "*"}
    assert wanted <= described(schema())
    for name in names():
        if not name.section and not name.dotted.startswith("data.eval.*"):
            row = next(line for line in page.splitlines() if line.startswith(f"| `{name.dotted.replace('*', '0')}` |"))
            assert str(name.field.description) in row


def good() -> dict[str, Any]:
    return {"name": "a", "data": {"train": "x"}, "train": {"steps": 3}}


@pytest.mark.parametrize("template", templates())
def test_an_editor_accepts_every_template(template: str) -> None:
    assert accepts(schema(), parse(templates()[template], template).values)


@pytest.mark.parametrize("train", ["x", ["x", "y"], [{"path": "x", "weight": 2}], {"path": "x"}, ["x", {"path": "y"}]])
def test_an_editor_accepts_every_form_of_a_source(train: object) -> None:
    assert accepts(schema(), {**good(), "data": {"train": train}})


def test_an_editor_accepts_data_of_ones_own() -> None:
    assert accepts(schema(), {**good(), "data": {"seq_len": 8}, "own": {"data": "mine:Source"}})


@pytest.mark.parametrize("every", ["auto", 0, 50, "10 min", "1.5h"])
def test_an_editor_accepts_every_form_of_an_interval(every: object) -> None:
    assert accepts(schema(), {**good(), "checkpoint": {"every": every}})


@pytest.mark.parametrize(
    "wrong",
    [
        {"seeed": 1},
        {"train": {}},
        {"train": {"steps": 0}},
        {"train": {"steps": True}},
        {"train": {"steps": 3, "optimizer": {"betas": [0.9, 1.0]}}},
        {"train": {"steps": 3, "optimizer": {"betas": [0.9]}}},
        {"train": {"steps": 3, "precision": "fp16"}},
        {"model": {"kv_heads": "many"}},
        {"data": {"train": [{"weight": 2}]}},
        {"data": {"seq_len": 8}},
        {"data": {"seq_len": 8}, "own": {"loop": "mine:loop"}},
        {"name": "a/b"},
        {"checkpoint": {"every": "10 parsecs"}},
        {"checkpoint": {"remote": "/disk"}},
    ],
)
def test_an_editor_marks_what_load_refuses(wrong: dict[str, Any]) -> None:
    assert accepts(schema(), good())
    assert not accepts(schema(), {**good(), **wrong})


def test_the_schema_is_plain_json() -> None:
    assert json.loads(pages()["run.schema.json"]) == schema()
    assert schema()["$schema"] == "http://json-schema.org/draft-07/schema#"
