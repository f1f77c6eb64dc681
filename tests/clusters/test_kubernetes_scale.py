"""A thousand: nodes with 8 GPUs each, given out to one run, and jobs that are asked about at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml
from tests.clusters.api import Object
from tests.clusters.kubernetes import Cluster, cluster
from tests.clusters.kubernetes_place import Place, place
from tests.patience import limit

from shoal.launch.job import Job
from shoal.launch.kubernetes import client

pytestmark = [pytest.mark.cluster, pytest.mark.alone]
MANY, GPUS = 1000, 8


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[Cluster]:
    with cluster(lost_after_s=600) as made:
        yield made


@pytest.fixture(scope="module")
def here(kubernetes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(kubernetes, tmp_path_factory.mktemp("place")) as made:
        yield made


def test_a_thousand_jobs_are_asked_about_at_once(
    here: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (part,) = here.backend.render(here.request("many"))
    manifest = next(yaml.safe_load_all(part.text))
    manifest["spec"]["suspend"] = True
    jobs = f"/apis/batch/v1/namespaces/{here.namespace}/jobs"

    def create(i: int) -> Job:
        created = here.api.create(jobs, _named(manifest, f"many-{i}"))
        where = {"kind": "jobs.batch", "uid": created["metadata"]["uid"], "context": "test"}
        return Job(f"many-{i}", "kubernetes", f"{here.namespace}/many-{i}", time.time(), 2, 0, "/workspace", "", where)

    with ThreadPoolExecutor(8) as pool:
        sent = list(pool.map(create, range(MANY)))
    calls: list[tuple[str, ...]] = []
    call = client.Cluster.call

    def counted(self: client.Cluster, *asked: str, **more: Any) -> str:
        calls.append(asked)
        return call(self, *asked, **more)

    monkeypatch.setattr(client.Cluster, "call", counted)
    begun = time.monotonic()
    states = here.backend.states(sent)
    took_s = time.monotonic() - begun
    assert {states[job.id].why for job in sent} == {"somebody has suspended it"}
    assert len(calls) <= 2
    with capsys.disabled():
        print(f"\n{MANY} jobs asked about in {took_s:.1f} s, with {len(calls)} questions")


def test_a_thousand_nodes_are_given_out_at_once(here: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing runs there; the scheduler and the controllers do what they would do if it did."""
    begun = time.monotonic()
    here.cluster.add_fake_nodes(MANY, GPUS)
    registered_s = time.monotonic() - begun
    begun = time.monotonic()
    job = here.submit("large", **{"launch.nodes": MANY, "launch.gpus": GPUS, "resources.device": "auto"})
    submitted_s = time.monotonic() - begun
    bound: set[str] = set()
    while len(bound) < MANY and time.monotonic() < begun + limit(200):  # the server drops a watch that lags behind
        for _, pod in here.api.watch(f"/api/v1/namespaces/{here.namespace}/pods", timeout_s=200):
            bound |= {pod["spec"]["nodeName"]} if pod["spec"].get("nodeName") else set()
            if len(bound) == MANY:
                break
    placed_s = time.monotonic() - begun
    assert len(bound) == MANY, f"only {len(bound)} pods have a node"
    begun = time.monotonic()
    state = here.state(job)
    asked_s = time.monotonic() - begun
    assert state.phase == "starting"
    assert len(state.nodes) == MANY
    with capsys.disabled():
        print(
            f"\n{MANY} nodes registered in {registered_s:.1f} s; a run over all submitted in {submitted_s:.1f} s, its "
            f"{MANY} pods of {GPUS} GPUs placed after {placed_s:.1f} s, its state told in {asked_s:.1f} s"
        )


def _named(manifest: Object, name: str) -> Object:
    labels = {**manifest["metadata"]["labels"], "shoal/job": name}
    return {**manifest, "metadata": {**manifest["metadata"], "name": name, "labels": labels}}
