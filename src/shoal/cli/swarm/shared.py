"""What several words of `shoal swarm` need: a peer's folder by its run's name, options, invitations on disk."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import shlex
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import add_workspace
from shoal.errors import SetupError, UsageError
from shoal.masking import INVITATION, hide_argument
from shoal.net.relay_url import is_relay
from shoal.plain_file import open_plain, read_words

if TYPE_CHECKING:
    from shoal.swarm.config import NodeConfig
    from shoal.swarm.invite import Invitation

MOST_LINE = 1 << 16


def add_peer(parser: argparse.ArgumentParser) -> None:
    """Options of the two words that start a peer."""
    parser.add_argument("--name", metavar="NAME", help="what the others see of this peer (default: the machine's name)")
    parser.add_argument(
        "--relay", action="append", default=[], metavar="URL", help="http://host:port of a `shoal swarm relay`; several"
    )
    parser.add_argument("--listen", metavar="IP[:PORT]", help="of this machine (default: all, and a port that is free)")
    parser.add_argument("--tcp-only", action="store_true", help="no NAT traversal: peers of one network or machine")
    parser.add_argument("--no-train", action="store_true", help="help the others (data, history) and compute nothing")
    parser.add_argument("--trainer", metavar="COMMAND", help="trains instead of Shoal's own")
    add_workspace(parser)


def settled(config: NodeConfig, args: argparse.Namespace) -> NodeConfig:
    """With what the command line says."""
    host, port = _listen(args.listen) if args.listen else (config.host, config.port)
    for url in args.relay:
        if not is_relay(url):
            raise UsageError(f"--relay {url}: give an address such as http://relay.example.org:3340.")
    name = args.name or config.name or socket.gethostname()
    if len(name) > 64 or not name.isprintable():
        raise UsageError("--name: at most 64 letters that can be printed.")
    return replace(
        config,
        name=name,
        relays=tuple(dict.fromkeys((*(u.rstrip("/") for u in args.relay), *config.relays)))[:4],
        host=host,
        port=port,
        tcp_only=args.tcp_only or config.tcp_only,
        train=not args.no_train,
        trainer=tuple(shlex.split(args.trainer)) if args.trainer else config.trainer,
    )


def find(name: str, workspace_option: str | None) -> NodeConfig:
    """The peer of that run on this machine."""
    from shoal.journal.rundir import RunDir, workspace
    from shoal.swarm.config import NodeConfig, folder_of

    folder = workspace(workspace_option)
    run_dir = RunDir(Path(name).resolve()) if os.sep in name else RunDir.of(name, folder)
    config = NodeConfig(folder_of(run_dir))
    if not config.charter_file.exists():
        others = sorted(p.parent.parent.name for p in (folder / "runs").glob("*/swarm/charter.json"))
        hint = f"there are {', '.join(others)}" if others else "`shoal swarm join INVITE` enters one"
        raise UsageError(f"there is no swarm '{name}' in {folder / 'runs'}; {hint}.")
    return NodeConfig.load(config.folder)


def is_line(text: str) -> bool:
    """Whether somebody gave an invitation, in one of the three ways, and not the name of a run."""
    return text.strip() == "-" or text.strip().startswith(("@", INVITATION))


def read_line(text: str) -> Invitation:
    """An invitation as given: the line, `@FILE` that holds it, or `-` for the standard input.

    A line that was typed can be seen by every user of the machine, and stands in the shell's history; the former is
    ended here, the latter is nothing that a program can mend."""
    from shoal.swarm.invite import Invitation

    given = text.strip()
    if given == "-":
        return Invitation.read(sys.stdin.read(MOST_LINE))
    if not given.startswith("@"):
        hide_argument(text)
        return Invitation.read(text)
    file = Path(given[1:]).expanduser()
    try:
        with open(open_plain(file), encoding="utf-8") as f:
            line, mode = f.read(MOST_LINE), os.fstat(f.fileno()).st_mode
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"the invitation {file} cannot be read ({getattr(e, 'strerror', None) or e}).") from None
    if mode & 0o077 and os.name != "nt":
        print(f"shoal: {file} can be read by others, who can join then: run `chmod 600 {file}`.", file=sys.stderr)
    return Invitation.read(line)


def keep(config: NodeConfig, invitation: Invitation) -> None:
    """On disk, for its owner alone: whoever has it can join."""
    config.invitations.mkdir(parents=True, exist_ok=True)
    file = config.invitations / f"{invitation.id[:12]}.txt"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        f.write(invitation.line() + "\n")


def kept(config: NodeConfig) -> list[Invitation]:
    """Those that are on disk, the newest last."""
    from shoal.swarm.invite import Invitation

    try:
        files = sorted(config.invitations.glob("*.txt"), key=lambda f: f.stat().st_mtime)
    except OSError as e:
        raise SetupError(f"{config.invitations} cannot be read ({e.strerror}).") from None
    return [Invitation.read(read_words(f, MOST_LINE)) for f in files]


def start(config: NodeConfig) -> int:
    """The node of this peer, by what its swarm trains; until it ends."""
    from shoal.swarm.charter import Charter

    stages = Charter.load(config.charter_file).stages
    refuse_helpers(config, stages)
    if stages > 1:
        from shoal.stages.node import run_node
    else:
        from shoal.swarm.start import run_node
    return run_node(free(config))


def refuse_helpers(config: NodeConfig, stages: int) -> None:
    if stages > 1 and not (config.train and not config.trainer):
        raise UsageError(
            "the model of this swarm is cut over its peers, so each holds a stage and computes it with Shoal's own "
            "trainer: leave --no-train and --trainer out."
        )


def free(config: NodeConfig) -> NodeConfig:
    """With another port where the usual one is taken."""
    if config.port:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((config.host, config.port))
            except OSError:
                return replace(config, port=0)
    return config


def _listen(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[^\]]+\]|[^:]+)(?::(\d+))?", text)
    try:
        if found is None:
            raise ValueError("no address")
        host, port = str(ipaddress.ip_address(found[1].strip("[]"))), int(found[2] or 0)
        if port > 65535:
            raise ValueError("no port")
    except ValueError:
        raise UsageError(f"--listen {text}: give an IP address of this machine, as in 0.0.0.0:4001.") from None
    return host, port
