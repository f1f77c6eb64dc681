"""A script is told by `script.accelerate` what the real `accelerate launch` tells it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.errors import SpecError
from shoal.script.accelerate import environment
from shoal.spec.accelerate import Accelerate
from shoal.spec.resolve import of_values
from tests.script.accelerate_golden import CASES, FILE, PREFIXES
from tests.script.conftest import ScriptRun

GOLDEN: dict[str, Any] = json.loads(FILE.read_text())


def test_every_case_was_launched() -> None:
    assert {name: one["section"] for name, one in GOLDEN.items()} == {name: case[0] for name, case in CASES.items()}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_environment_is_that_of_accelerate_launch(name: str) -> None:
    assert environment(Accelerate.model_validate(GOLDEN[name]["section"])) == GOLDEN[name]["env"]


def test_every_name_is_in_a_case() -> None:
    """So that none was written down without Accelerate having been asked."""

    def names(section: Any, before: str = "") -> set[str]:
        return {name for key, value in section.items() for name in (before + key, *_inner(value, f"{before}{key}."))}

    def _inner(value: Any, before: str) -> set[str]:
        return names(value, before) if isinstance(value, dict) else set()

    tried = set[str]().union(*(names(case) for case, _ in CASES.values()))
    schema = Accelerate.model_json_schema()
    offered = set(schema["properties"])
    for kind, section in schema["$defs"].items():
        offered |= {f"{kind.lower()}.{name}" for name in section["properties"]}
    assert len(offered) > 25
    assert offered == tried


def test_a_script_is_told(script: ScriptRun) -> None:
    text = """
    import json
    json.dump(dict(os.environ), open("told", "w"))
    """
    asked = ("script.accelerate.mixed_precision=fp16", "script.accelerate.fsdp.offload_params=true")
    assert script.run(text, "--no-probe", *asked) == 0
    told = json.loads(script.file("told"))
    section = Accelerate.model_validate({"mixed_precision": "fp16", "fsdp": {"offload_params": True}})
    assert {name: value for name, value in told.items() if name.startswith(PREFIXES)} == environment(section)


@pytest.mark.parametrize(
    ("section", "more", "told"),
    [
        ({"fsdp": {}, "deepspeed": {}}, {}, "has fsdp and deepspeed, which do the same"),
        ({"parallelism": {"dp_shard": 2}}, {"processes": 2}, "script.accelerate.parallelism is for FSDP2"),
        ({"deepspeed": {}, "dynamo": {"backend": "inductor"}}, {}, "does not tell a script with DeepSpeed"),
        (
            {"deepspeed": {"config_file": "a.json", "zero_stage": 2}},
            {},
            "deepspeed.zero_stage itself",
        ),
        ({"fsdp": {}}, {"env": {"FSDP_VERSION": "1"}}, "script.env.FSDP_VERSION is what script.accelerate says"),
        ({"fsdp": {"version": 1}}, {}, "version"),
        ({"mixed_precision": "fp8"}, {}, "script.accelerate.mixed_precision"),
    ],
)
def test_what_has_no_effect_is_refused(section: dict[str, Any], more: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        of_values({"name": "demo", "script": {"path": "train.py", "accelerate": section, **more}}, [])


def test_a_mesh_has_as_many_places_as_there_are_processes(script: ScriptRun) -> None:
    sizes = ("script.accelerate.fsdp.offload_params=false", "script.accelerate.parallelism.tp=2")
    assert script.run("", "--processes", "3", *sizes) == 2
    assert "script.accelerate.parallelism make 2 processes and script.processes is 3" in script.err


def test_a_bare_no_of_yaml_is_the_word(script: ScriptRun) -> None:
    (script.folder / "run.yaml").write_text(
        "name: demo\nscript:\n  path: train.py\n  accelerate: {mixed_precision: no, dynamo: {backend: no}}\n"
    )
    script.write("assert os.environ['ACCELERATE_MIXED_PRECISION'] == 'no'")
    assert script.shoal("run", "run.yaml", "track.mlflow=false") == 0
