"""Two nodes whose own names lead to themselves (Debian's /etc/hosts: 127.0.1.1) join and train: real name spaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.agents import Cluster
from tests.namespaces import need_namespaces
from tests.train.tiny import make_data, make_run

from shoal.emulate import spaces

pytestmark = [pytest.mark.cluster, pytest.mark.uses("wan")]

ADDRESSES = ("10.77.0.1", "10.77.0.2")
# A mount name space with an /etc/hosts of its own, and a host name of its own.
AS_A_NODE = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[dict[int, list[str]]]:
    """What a command is put behind to run on one of two machines that a cable joins."""
    need_namespaces()
    names = [f"{spaces.prefix()}{i}" for i in (0, 1)]
    spaces.sweep()
    spaces.make(names)
    try:
        spaces.ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            for device, *settings in (["lo"], ["eth0", f"{address}/24"]):
                for one in settings:
                    spaces.ip("-n", name, "address", "add", one, "dev", device)
                spaces.ip("-n", name, "link", "set", device, "up")
        behind = {}
        for i, name in enumerate(names):
            other = f"{ADDRESSES[1 - i]} node{1 - i}\n"
            (hosts := tmp_path / f"hosts-{i}").write_text(f"127.0.0.1 localhost\n127.0.1.1 node{i}\n{other}")
            behind[i] = ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "sh", "-c", AS_A_NODE]
            behind[i] += [str(hosts), f"node{i}"]
        yield behind
    finally:
        spaces.remove(names)


def test_nodes_whose_names_are_127_0_1_1_to_themselves_join_and_train(
    nodes: dict[int, list[str]], tmp_path: Path
) -> None:
    data = make_data(tmp_path / "data")
    few = {"train.steps": 2, "train.schedule.warmup_steps": 1, "checkpoint.every": 1}
    run = make_run(data, name="met", **few, **{"mesh.dp_shard": 2})
    cluster = Cluster(run, tmp_path, 2, host="node0", before=nodes, env={"SHOAL_NODES_HERE": "1"})
    try:
        cluster.start_all()
        codes = cluster.codes(90.0)
    finally:
        cluster.close()
    assert codes == {0: 0, 1: 0}, cluster.log(0).read_text()
    assert [r["step"] for r in cluster.records("step")] == [1, 2]
    assert "this node is reached at 10.77.0.1 (eth0)" in cluster.log(0).read_text()
