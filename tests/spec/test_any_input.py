"""Whatever is in the file or on the command line, `load` gives a run or a sentence, never a traceback."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.spec import load
from shoal.spec.names import names
from shoal.spec.yaml_text import dump_yaml
from tests.spec.wrong import GOOD

WORDS = st.sampled_from(["auto", "tiny", "1e999", "\0"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), WORDS)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
PATHS = st.sampled_from([tuple("0" if part == "*" else str(part) for part in name.path) for name in names()])
OVERRIDES = st.builds(lambda path, value: f"{'.'.join(path)}={value}", PATHS, VALUES | st.text(max_size=12))
PIECES = [*"ab:- \n\t[]{}#&*!|>'\"%@`,?~0", "train", "steps: ", "\x85", "\ufeff", "9" * 5000]


def is_read_or_refused(text: str, overrides: list[str]) -> None:
    """Anything but a ShoalError is a defect, and fails the test that called this."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        with contextlib.suppress(ShoalError):
            load(file, overrides)


@settings(max_examples=100, deadline=None)
@given(PATHS, VALUES, st.lists(OVERRIDES, max_size=2))
@example(("model", "weights"), "\0", [])
@example(("data", "train"), {"path": None}, ["data.train.0.path=x"])
@example(("data",), [], ["data.train.0=x"])
def test_a_wrong_value_anywhere_is_a_sentence(path: tuple[str, ...], value: object, overrides: list[str]) -> None:
    document: dict[str, object] = {"name": "a", "data": {"train": "x"}, "train": {"steps": 9}}
    inner: object = document
    for part in path[:-1]:
        if not isinstance(inner, dict):
            return
        inner = inner.setdefault(part, {})
    if isinstance(inner, dict):
        inner[path[-1]] = value
    is_read_or_refused(dump_yaml(document), overrides)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
@example("seed: " + "9" * 5000)
def test_any_text_is_a_sentence(text: str) -> None:
    is_read_or_refused(text, [])
    is_read_or_refused(GOOD + text, [])
