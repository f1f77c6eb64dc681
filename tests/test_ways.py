"""How the others reach this node: by the way on which they met, never by what its own name is here."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from shoal import ways
from shoal.errors import SetupError
from shoal.guard.nodes.crew import _listening
from shoal.guard.workers import Share, Workers, log_file, worker_env
from tests.guard.fake import until

ADDRESSES = [("lo", "127.0.0.1"), ("lo", "::1"), ("eth0", "10.0.0.5"), ("ib0", "10.1.0.5"), ("docker0", "172.17.0.1")]


@pytest.fixture
def five(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with several interfaces."""
    monkeypatch.setattr(ways, "interfaces", lambda: iter(ADDRESSES))
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(["lo", "eth0", "ib0", "docker0"])))


def test_this_machines_own_addresses_are_found() -> None:
    assert ("lo", "127.0.0.1") in list(ways.interfaces())
    assert ways.interface_of("127.0.0.1") == "lo"
    assert ways.interface_of("203.0.113.9") is None


def test_gloo_and_nccl_get_the_interface_of_the_way(five: None) -> None:
    told = {"SHOAL_ADDRESS": "10.1.0.5", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    assert ways.settings("10.1.0.5", {}) == told
    assert ways.sentence("10.1.0.5") == "this node is reached at 10.1.0.5 (ib0)"
    # Behind a translation of addresses nothing is known: both choose for themselves.
    assert ways.settings("203.0.113.9", {}) == {"SHOAL_ADDRESS": "203.0.113.9"}


def test_what_the_user_has_set_stays(five: None) -> None:
    mine = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "^docker,lo"}
    assert ways.settings("10.1.0.5", mine) == {"SHOAL_ADDRESS": "10.1.0.5", **mine}
    assert ways.settings("127.0.0.1", {"GLOO_SOCKET_IFNAME": "lo"})["GLOO_SOCKET_IFNAME"] == "lo"  # all on one machine


@pytest.mark.parametrize(
    ("mine", "says"),
    [
        ({"GLOO_SOCKET_IFNAME": "lo"}, "GLOO_SOCKET_IFNAME is lo, which no other node can reach, .* name eth0"),
        ({"NCCL_SOCKET_IFNAME": "=lo"}, "NCCL_SOCKET_IFNAME is =lo, which no other node can reach"),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "GLOO_SOCKET_IFNAME is eth7, and this node has no interface eth7"),
    ],
)
def test_what_nobody_could_reach_is_refused(five: None, mine: dict[str, str], says: str) -> None:
    with pytest.raises(SetupError, match=says):
        ways.settings("10.0.0.5", mine)


def test_a_name_that_leads_to_itself_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts on the node that all meet at: its own name is 127.0.1.1 there, and there alone."""
    monkeypatch.setattr(ways, "reachable_address", lambda master: "127.0.1.1")
    monkeypatch.setattr(ways, "_way_out", lambda: "10.0.0.5")
    assert ways.own_address("node0", {}) == "10.0.0.5"
    assert ways.own_address("node0", {"SHOAL_ADDRESS": "10.9.9.9"}) == "10.9.9.9"  # its agent knows better
    assert ways.own_address("localhost", {}) == "127.0.1.1"  # meant so: all of them are here
    monkeypatch.setattr(ways, "_way_out", lambda: None)
    with pytest.raises(SetupError, match=r"node0 is 127\.0\.1\.1 on this node, where no other node can reach it"):
        ways.own_address("node0", {})


def test_workers_of_several_nodes_are_told_and_those_of_one_are_not(
    five: None, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    share = Share(1, 8, 8, ("node0", 4000), "10.0.0.5")
    env = worker_env(9, 16, 0, 1, tmp_path, share)  # type: ignore[arg-type]  # any path
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"], env["SHOAL_ADDRESS"]) == ("eth0", "=eth0", "10.0.0.5")
    alone = worker_env(0, 2, 0, 1, tmp_path)  # type: ignore[arg-type]
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "SHOAL_ADDRESS"} & alone.keys()


def test_rank_0_is_handed_a_socket_that_listens_already(tmp_path: Path) -> None:
    """A port that is only looked for can be somebody else's by the time rank 0 has started."""
    say = "import os, socket; s = socket.socket(fileno=int(os.environ['SHOAL_LISTENING'])); print(s.getsockname()[1])"
    with _listening() as held:
        port = held.getsockname()[1]
        share = Share(0, 0, 1, ("127.0.0.1", port), None, held.fileno())
        workers = Workers([sys.executable, "-c", say], 1, 0, tmp_path, 1, share)
    with socket.create_connection(("127.0.0.1", port)):  # it waits for rank 0 to be ready
        until(lambda: bool(workers.reap()))
    workers.close()
    assert log_file(tmp_path, 0, 0).read_text().split() == [str(port)]
    assert "SHOAL_LISTENING" not in worker_env(1, 2, 0, 1, tmp_path, share)
