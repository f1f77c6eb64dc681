"""A trace of another tool, or with holes: what has another type is not said, and the rest is read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import DataError
from shoal.profile import trace
from shoal.profile.analyse import analyse


def a_trace() -> dict[str, Any]:
    args = {"External id": 1, "Sequence number": 3, "Input Dims": [[2, 3], []], "Input type": ["float", "Scalar"]}
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 2, "ts": 10.0, "dur": 5.0, "args": args}
    step = {**event, "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 5.0, "dur": 20.0, "args": {}}
    return {"traceEvents": [step, event], "shoal": {"steps": 1, "step_s": [2e-5], "world": 1, "rank": 0, "cores": 2}}


def test_no_field_of_the_wrong_type_is_a_defect(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    whole = a_trace()
    file.write_text(json.dumps(whole))
    assert analyse(file).steps == 1
    spots = [("traceEvents", 1, name) for name in whole["traceEvents"][1]]
    spots += [("traceEvents", 1, "args", name) for name in whole["traceEvents"][1]["args"]]
    spots += [("shoal", name) for name in whole["shoal"]]
    for spot in spots:
        for new in (None, [], {}, "x", -1, 1e308, 10**30, True, [None], float("nan")):
            said = a_trace()
            inner: Any = said
            for key in spot[:-1]:
                inner = inner[key]
            inner[spot[-1]] = new
            file.write_text(json.dumps(said))
            try:
                analyse(file)
            except DataError as e:
                assert "\n" not in str(e)  # noqa: PT017


def test_a_packed_bomb_ends_at_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_BYTES", 1 << 16)
    file = tmp_path / "t.json.gz"
    file.write_bytes(gzip.compress(b" " * (1 << 22)))
    with pytest.raises(DataError, match="bytes unpacked"):
        trace.read(file)
    file.write_bytes(gzip.compress(json.dumps(a_trace()).encode())[:-20])
    with pytest.raises(DataError, match="cut off"):
        trace.read(file)
