"""How this node is reached by the others of a run: its address and network interface, from the way on which they met.

Never from the host's name: with Debian's usual /etc/hosts that is 127.0.1.1, which gloo would publish to the other
nodes, and they would wait for ten minutes. No torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping

from shoal.errors import SetupError, TransientError

ADDRESS = "SHOAL_ADDRESS"  # of this node, where its agent knows it
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
ANYWHERE = "192.0.2.1"  # a test network's: nothing is sent there, the kernel is asked which way it would take


def settings(address: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What processes of this node are told, so that gloo and NCCL use the interface with that address. What the user
    has set stays, unless the other nodes cannot reach it: then it is refused."""
    found = interface_of(address)
    given = {name: environ[name] for name in (GLOO, NCCL) if environ.get(name)}
    if not is_loopback(address):
        for name, value in given.items():
            _refuse_unreachable(name, value, address)
    ours = {} if found is None else {GLOO: found, NCCL: f"={found}"}
    return {ADDRESS: address} | ours | given


def sentence(address: str) -> str:
    found = interface_of(address)
    return f"this node is reached at {address}" + (f" ({found})" if found else ", which is on none of its interfaces")


def own_address(master: str, environ: Mapping[str, str] = os.environ) -> str:
    """Of this node, given the name or address of the one where all meet."""
    if known := environ.get(ADDRESS):
        return known
    found = reachable_address(master)
    if not is_loopback(found) or _means_loopback(master):
        return found
    # This is that node, and its own name leads to itself alone. The others come by the way that leads out.
    if out := _way_out():
        return out
    raise SetupError(
        f"{master} is {found} on this node, where no other node can reach it, and no way leads out: give an address "
        f"of this node in MASTER_ADDR, or set {ADDRESS}."
    )


def reachable_address(master: str) -> str:
    """The address of this node that the other nodes can reach, given that of the node which they all meet at."""
    for about in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
        with socket.socket(about[0], socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            with contextlib.suppress(OSError):
                probe.bind((about[4][0], 0))
                return str(about[4][0])  # this is that node
            probe.connect(about[4])  # sends nothing
            return str(probe.getsockname()[0])
    raise TransientError(f"no way leads from this node to {master}.")


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def interface_of(address: str) -> str | None:
    """The name of the interface that has it."""
    return next((name for name, one in interfaces() if one == address), None)


def _way_out() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((ANYWHERE, 9))
        return str(probe.getsockname()[0])
    return None


def _means_loopback(master: str) -> bool:
    return master == "localhost" or is_loopback(master)


def _refuse_unreachable(name: str, value: str, address: str) -> None:
    """NCCL's may name what is left out (^docker) or beginnings (eth); only what is surely wrong is refused."""
    named = [part.removeprefix("=") for part in value.split(",")]
    there = dict(interfaces())
    if all(part in there and is_loopback(there[part]) for part in named):
        raise SetupError(
            f"{name} is {value}, which no other node can reach, and they reach this one at {address}: unset it, or "
            f"name {interface_of(address) or 'another interface'}."
        )
    if name == GLOO and (absent := [part for part in named if part not in {n for _, n in socket.if_nameindex()}]):
        raise SetupError(f"{name} is {value}, and this node has no interface {absent[0]}: unset it, or name one.")


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
)


def interfaces() -> Iterator[tuple[str, str]]:
    """(interface, address) of this machine, IPv4 and IPv6, by getifaddrs(3); none where that is not Linux's."""
    libc, head = ctypes.CDLL(None), ctypes.POINTER(_IfAddrs)()
    if not hasattr(socket, "AF_NETLINK") or libc.getifaddrs(ctypes.byref(head)):
        return
    found, at = [], head
    try:
        while at:
            one = at.contents
            if one.address and (text := _text_of(one.address.contents)):
                found.append((one.name.decode(), text))
            at = one.next
    finally:
        libc.freeifaddrs(head)
    yield from found


def _text_of(address: _SockAddr) -> str | None:
    data = bytes(address.data)
    if address.family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, data[2:6])
    if address.family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, data[6:22])
    return None
