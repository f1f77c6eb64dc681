"""What the agents of a job print, over all its pods, as one stream of lines that begin with their node's number."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from shoal.launch.kubernetes import names
from shoal.launch.kubernetes.client import Cluster, Refused
from shoal.launch.kubernetes.things import time_of

LOOK_EVERY_S = 2.0
OVERLAP = timedelta(seconds=30)  # nodes' clocks differ; what comes twice is dropped
_LINE = re.compile(r"\[pod/(\S+)/[^\]]+\] (\d{4}-\d\d-\d\dT[\d:]+)(\.\d+)?Z ?(.*)")
_NODE = re.compile(r"-(\d+)-[a-z0-9]+$")


class Line(NamedTuple):
    at: str  # the node's time to the nanosecond, which sorts as text
    pod: str
    text: str

    @property
    def shown(self) -> str:
        node = _NODE.search(self.pod)
        return f"[{node[1] if node else self.pod}] {self.text}"


def merged(cluster: Cluster, namespace: str, name: str, last: int | None) -> Iterator[str]:
    """Of all pods that there were and still are, by time."""
    lines = _read(cluster, namespace, name, "--tail=-1")
    return (line.shown for line in (lines if last is None else deque(lines, maxlen=last)))


def follow(cluster: Cluster, namespace: str, name: str, last: int, over: Callable[[], bool]) -> Iterator[str]:
    """The last lines, then new ones as they come, until the job is over.

    It asks again and again instead of holding a stream a pod: pods that come later are in it, and a thousand nodes need
    one process here, not a thousand.
    """
    lines = _read(cluster, namespace, name, "--tail=-1")[-last:] if last else []
    newest: dict[str, str] = {}
    while True:
        for line in lines:
            if line.at > newest.get(line.pod, ""):
                newest[line.pod] = line.at
                yield line.shown
        ended = over()  # asked before the last look: what was printed until then is read
        since = datetime.now(UTC) - OVERLAP
        if newest:
            since = min(since, datetime.fromisoformat(max(newest.values())[:19]).replace(tzinfo=UTC) - OVERLAP)
        lines = _read(cluster, namespace, name, f"--since-time={since:%Y-%m-%dT%H:%M:%SZ}")
        if ended:
            yield from (line.shown for line in lines if line.at > newest.get(line.pod, ""))
            return
        if not any(line.at > newest.get(line.pod, "") for line in lines):
            time.sleep(LOOK_EVERY_S)


def _read(cluster: Cluster, namespace: str, name: str, what: str) -> list[Line]:
    asked = ["logs", "-n", namespace, "-l", f"{names.JOB}={name}", "-c", names.CONTAINER]
    asked += ["--prefix", "--timestamps", "--ignore-errors", what]
    try:
        return sorted(parsed(cluster.call(*asked).splitlines()), key=lambda line: line.at)
    except Refused:  # no container has started yet
        return []


def parsed(lines: Iterable[str]) -> Iterator[Line]:
    """What is no line of a container (kubectl's own remarks) is left out."""
    for line in lines:
        if (found := _LINE.fullmatch(line)) and time_of(found[2]) is not None:
            yield Line(f"{found[2]}{(found[3] or '.'):0<10}", found[1], found[4])
