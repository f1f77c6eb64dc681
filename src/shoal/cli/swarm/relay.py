"""`shoal swarm relay`: a relay for peers that cannot reach each other, on any machine that they can reach."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import signal
import time
from typing import Any

from shoal.cli.swarm.shared import read_line
from shoal.errors import UsageError
from shoal.readable import size

EVERY_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=3340, metavar="N", help="TCP and UDP (default 3340)")
    parser.add_argument("--host", default="0.0.0.0", metavar="IP", help="of this machine, to listen on (default: all)")
    parser.add_argument("--public", default="", metavar="IP", help="by which peers reach it, if it has another itself")
    parser.add_argument(
        "--only-invited",
        action="append",
        metavar="INVITE",
        help="carry only peers of this invitation's swarm (or @FILE)",
    )


def run(args: argparse.Namespace) -> int:
    for option, value in (("--host", args.host), ("--public", args.public)):
        with contextlib.suppress(ValueError):
            if value == "" or ipaddress.ip_address(value):
                continue
        raise UsageError(f"{option} {value}: give an IP address.")
    if not 0 <= args.port < 1 << 16:
        raise UsageError(f"--port {args.port}: give a number below 65536.")
    return asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> int:
    from shoal.net.relay import Relay  # the extra's packages, only where they are needed

    relay = Relay(args.host, args.port, _admit(args.only_invited or []), args.public, _say)
    await relay.start()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    where = args.public or (args.host if args.host not in ("0.0.0.0", "::") else "ADDRESS")
    print(
        f"Relay at http://{where}:{relay.port} (TCP and UDP {relay.port}), for `--relay` of peers; Ctrl-C ends it.",
        flush=True,
    )
    last = 0
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVERY_S):
                await stop.wait()
        now = relay.counters.bytes
        if now != last:
            share = f"{relay.counters.dropped:,} of {relay.counters.packets:,} packets dropped"
            print(f"{_clock()} {len(relay.clients())} peers, {size(now)} carried, {share}", flush=True)
        last = now
    await relay.close()
    return 0


def _admit(invitations: list[str]) -> Any:
    """A member shows its admission, which names its key; the relay needs no list of members and no state."""
    if not invitations:
        return None
    from shoal.net.relay import proof_of
    from shoal.swarm.invite import Admission
    from shoal.swarm.signed import Forged

    swarms = [(known.swarm, known.ticket.organiser) for known in map(read_line, invitations)]

    def admit(peer: str, token: str) -> str:
        if any(peer == organiser for _, organiser in swarms):
            return ""
        shown = proof_of(token)  # a peer's whole record (`Roster.proof`), or its admission alone
        admission = shown.get("admission", shown) if isinstance(shown, dict) else None
        for swarm, organiser in swarms:
            # Not asked whether the invitation is still good: a member of last month needs the relay as well, and who
            # may become one is for the members to say.
            with contextlib.suppress(Forged):
                Admission.of(admission, peer, swarm, organiser)
                return ""
        return "this relay carries only members of a swarm, and no admission was shown"

    return admit


def _say(kind: str, **fields: Any) -> None:
    match kind:
        case "relay_client":
            print(f"{_clock()} + {fields['peer'][:10]} from {fields['where']}", flush=True)
        case "relay_gone":
            print(f"{_clock()} - {fields['peer'][:10]} from {fields['where']}", flush=True)
        case "relay_refused":
            print(f"{_clock()} ! {fields['where']}: {fields['why']}", flush=True)


def _clock() -> str:
    return time.strftime("%H:%M:%S")
