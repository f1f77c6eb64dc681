"""A launch over 1,000 nodes is rendered at once, whoever it is for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shoal.launch.backend import backend
from shoal.launch.send import request_of
from shoal.spec.run import Run


@pytest.mark.parametrize("on", ["local", "slurm", "kubernetes", "ray"])
def test_a_thousand_nodes_render_in_under_two_seconds(tmp_path: Path, on: str) -> None:
    launch = {
        "on": on,
        "nodes": 1000,
        "gpus": 8,
        "image": "registry.example/shoal:1" if on == "kubernetes" else None,
        "workspace": "/shared",
        "volumes": [{"at": "/shared", "claim": "shared"}] if on == "kubernetes" else [],
    }
    run = Run.model_validate(
        {"name": "big", "data": {"train": "/shared/data"}, "train": {"steps": 9}, "launch": launch}
    )
    began = time.process_time()
    parts = backend(on).render(request_of(run, tmp_path))
    assert time.process_time() - began < 2.0
    assert "big" in "".join(part.text for part in parts)
