"""The network of the test's pods: a bridge in a namespace of its own, and the cluster's DNS on it.

`python -m tests.clusters.network CONFIG.json` prints, as JSON, where the namespace is; all of it is gone with the
process. The names are those of headless Services, from the EndpointSlices that the real controllers write: a Service
whose selector is wrong, or that hides pods which are not ready yet, resolves here as badly as in a real cluster.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.clusters.api import Api, ApiError, Object
from tests.clusters.container import NEWNET, die_with_parent, join, unshare

PREFIX = "10.244"  # nobody outside sees it
DNS = f"{PREFIX}.255.254"
BRIDGE = "pods"
A, IN, NO_SUCH_NAME = 1, 1, 3
TTL_S = 1


def address(node: int, pod: int) -> str:
    """Of the node's pod of that number; the 251st has that of the first, which is long gone."""
    return f"{PREFIX}.{node}.{1 + pod % 250}"


def plug(network: str, sandbox_pid: int, ip: str) -> None:
    """A cable from a pod's namespace to the bridge."""
    here, there = f"/proc/{sandbox_pid}/ns/net", f"v{sandbox_pid}"
    _ip("link", "add", "eth0", "netns", here, "type", "veth", "peer", "name", there, "netns", network)
    enter = ["nsenter", f"--net={here}", "ip"]
    subprocess.run([*enter, "address", "add", f"{ip}/16", "dev", "eth0"], check=True)
    for device in ("lo", "eth0"):
        subprocess.run([*enter, "link", "set", device, "up"], check=True)
    subprocess.run(["nsenter", f"--net={network}", "ip", "link", "set", there, "master", BRIDGE, "up"], check=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Names:
    """Who has which name, kept current from the API server."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._slices: dict[str, Object] = {}

    def watch(self) -> None:
        while True:
            try:
                self._slices.clear()
                for kind, found in self._api.watch("/apis/discovery.k8s.io/v1/endpointslices", timeout_s=600):
                    key = f"{found['metadata']['namespace']}/{found['metadata']['name']}"
                    if kind == "DELETED":
                        self._slices.pop(key, None)
                    else:
                        self._slices[key] = found
            except (OSError, ApiError):
                time.sleep(0.5)

    def addresses(self, name: str) -> list[str]:
        found = []
        for slice_ in list(self._slices.values()):
            service = slice_["metadata"].get("labels", {}).get("kubernetes.io/service-name")
            domain = f"{service}.{slice_['metadata']['namespace']}.svc.cluster.local"
            for endpoint in slice_.get("endpoints") or []:
                if endpoint.get("conditions", {}).get("ready") is False:
                    continue
                if name in (domain, f"{endpoint.get('hostname')}.{domain}"):
                    found += endpoint["addresses"]
        return found


def serve(sock: socket.socket, names: Names) -> None:
    while True:
        query, sender = sock.recvfrom(512)
        try:
            sock.sendto(answer(query, names), sender)
        except (IndexError, struct.error):
            continue


def answer(query: bytes, names: Names) -> bytes:
    """One question, one answer (RFC 1035, 4.1)."""
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode().lower())
        at += 1 + query[at]
    kind, _ = struct.unpack(">HH", query[at + 1 : at + 5])
    found = names.addresses(".".join(labels))
    records = b""
    for ip in found if kind == A else ():
        records += struct.pack(">HHHIH", 0xC00C, A, IN, TTL_S, 4) + socket.inet_aton(ip)
    flags = 0x8580 | (0 if found else NO_SUCH_NAME)
    count = len(records) // 16
    return query[:2] + struct.pack(">HHHHH", flags, 1, count, 0, 0) + query[12 : at + 5] + records


def main() -> None:
    die_with_parent()
    config = json.loads(Path(sys.argv[1]).read_text())
    host = f"/proc/{os.getpid()}/fd/{os.open('/proc/self/ns/net', os.O_RDONLY)}"
    unshare(NEWNET)
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("address", "add", f"{DNS}/16", "dev", BRIDGE)
    for device in ("lo", BRIDGE):
        _ip("link", "set", device, "up")
    network = f"/proc/{os.getpid()}/fd/{os.open('/proc/self/ns/net', os.O_RDONLY)}"
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)  # stays where it was made
    sock.bind((DNS, 53))
    join(host)
    names = Names(Api(config["url"], Path(config["ca"]), config["token"]))
    threading.Thread(target=names.watch, daemon=True).start()
    print(json.dumps({"network": network}), flush=True)
    serve(sock, names)


if __name__ == "__main__":
    main()
