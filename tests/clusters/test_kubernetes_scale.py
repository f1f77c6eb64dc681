"""1,000 nodes with 8 GPUs each, as far as the control plane can tell."""

from __future__ import annotations

import time

import pytest
from tests.clusters.api import Object
from tests.clusters.kubernetes import IMAGE, cluster

pytestmark = [pytest.mark.cluster, pytest.mark.alone]
NODES, GPUS = 1000, 8


def test_a_thousand_nodes_are_given_out_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(lost_after_s=600) as kubernetes:
        begun = time.monotonic()
        kubernetes.add_fake_nodes(NODES, GPUS)
        registered_s = time.monotonic() - begun
        begun = time.monotonic()
        kubernetes.api.create("/apis/batch/v1/namespaces/default/jobs", _job())
        bound: set[str] = set()
        while len(bound) < NODES and time.monotonic() < begun + 200:  # the server drops a watch that lags behind
            for _, pod in kubernetes.api.watch("/api/v1/namespaces/default/pods", timeout_s=200):
                bound |= {pod["spec"]["nodeName"]} if pod["spec"].get("nodeName") else set()
                if len(bound) == NODES:
                    break
        took_s = time.monotonic() - begun
        assert len(bound) == NODES, f"only {len(bound)} pods have a node"
    with capsys.disabled():
        print(
            f"\n{NODES} nodes registered in {registered_s:.1f} s; {NODES} pods of {GPUS} GPUs placed in {took_s:.1f} s"
        )


def _job() -> Object:
    gpus = {"limits": {"nvidia.com/gpu": str(GPUS)}}
    pod = {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": IMAGE, "resources": gpus}]}
    spec = {"completionMode": "Indexed", "completions": NODES, "parallelism": NODES, "template": {"spec": pod}}
    return {"metadata": {"name": "large"}, "spec": spec}
