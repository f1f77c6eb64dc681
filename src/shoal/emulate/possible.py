"""Whether this machine can emulate a network, and if not, why, before anything is started."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress

from shoal.emulate import spaces
from shoal.emulate.nat import guard
from shoal.errors import ShoalError


def possible() -> str:
    """One sentence that says why not; empty if it is."""
    if sys.platform != "linux":
        return "Emulated networks need Linux's network namespaces."
    if os.geteuid() != 0:
        return "Emulated networks need root, for network namespaces."
    if shutil.which("ip") is None:
        return "Emulated networks need the program `ip`: install the package iproute2."
    if shutil.which("nft") is None:
        return "NATs of emulated networks need the program `nft`: install the package nftables."
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as e:
        return f"Emulated networks need /dev/net/tun, which cannot be opened here: {e.strerror}."
    name = f"{spaces.prefix()}trial"
    try:
        spaces.make([name])
        spaces.inside(name, lambda: guard("symmetric"))
    except (ShoalError, OSError) as e:
        return f"Emulated networks are not allowed here: {e}"
    finally:
        with suppress(ShoalError):
            spaces.remove([name])
    return ""
