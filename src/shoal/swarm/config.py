"""What a node is started with, and where its peer keeps things. `shoal swarm create` and `join` make one.

A peer's folder is `runs/NAME/swarm` in its workspace. Everything a restart needs is in it, so a peer that was admitted
once needs its invitation no more.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import SetupError
from shoal.journal.rundir import RunDir
from shoal.plain_file import read_object
from shoal.values import BadValue, fields, flag, items, text, whole
from shoal.wire import MOST_PORT

FOLDER = "swarm"  # in the run directory
MOST_TEXT, MOST_TEXTS = 4096, 1000


@dataclass(frozen=True)
class NodeConfig:
    folder: Path  # runs/NAME/swarm
    name: str = ""  # of this peer, for people
    relays: tuple[str, ...] = ()  # http://host:port, besides those that others tell of
    host: str = ""  # the address to listen on; empty: all of this machine's
    port: int = 0  # of the TCP listener; 0: any that is free
    tcp_only: bool = False  # no QUIC, so no NAT traversal: one machine, one network
    train: bool = True  # False: helps others (history, blobs, gossip) and computes nothing
    trainer: tuple[str, ...] = ()  # empty: Shoal's own

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.folder.parent)

    @property
    def run(self) -> Path:
        """The run file as this peer reads it: the swarm's, with the paths of this machine."""
        return self.run_dir.spec_file

    @property
    def charter_file(self) -> Path:
        """What was agreed on when the swarm was made (`charter.Charter`); the hash of its bytes is the swarm's id."""
        return self.folder / "charter.json"

    @property
    def layout_file(self) -> Path:
        """Of a model that is cut over peers: who holds which stage, as the organiser has signed it."""
        return self.folder / "layout.json"

    @property
    def identity_file(self) -> Path:
        """This peer's secret key."""
        return self.folder / "peer.key"

    @property
    def organiser_file(self) -> Path:
        """The organiser's secret key; only where the swarm was made."""
        return self.folder / "organiser.key"

    @property
    def roster_file(self) -> Path:
        """Who is in the swarm, as signed records (`roster.Roster`)."""
        return self.folder / "roster.json"

    @property
    def blobs(self) -> Path:
        return self.folder / "blobs"

    @property
    def invitations(self) -> Path:
        """Lines that let others in, one a file named by the beginning of its id: the one this peer came by, and at the
        organiser's all that were made."""
        return self.folder / "invitations"

    @property
    def settings_file(self) -> Path:
        """What this object holds, for the next start."""
        return self.folder / "node.json"

    @property
    def status_file(self) -> Path:
        """Written by the node once a second, read by `shoal swarm status`."""
        return self.folder / "status.json"

    @property
    def commands(self) -> Path:
        """Files that tell a running node something: `leave`. It removes them when it has done so."""
        return self.folder / "commands"

    @property
    def trainer_command(self) -> tuple[str, ...]:
        return self.trainer or (sys.executable, "-m", "shoal.swarm.trainer.worker", str(self.run_dir.path))

    def save(self) -> None:
        held: dict[str, Any] = {name: value for name, value in vars(self).items() if name != "folder"}
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.settings_file.with_name(f".{self.settings_file.name}.{os.getpid()}")
        part.write_text(json.dumps(held, indent=2) + "\n")
        part.rename(self.settings_file)

    @classmethod
    def load(cls, folder: Path) -> NodeConfig:
        """As `save` left it."""
        file = cls(folder).settings_file
        try:
            s = fields(read_object(file), cls.__dataclass_fields__.keys() - {"folder"})
            return cls(
                folder,
                name=text(s.get("name"), MOST_TEXT),
                relays=_texts(s.get("relays")),
                host=text(s.get("host"), MOST_TEXT),
                port=whole(s.get("port"), MOST_PORT),
                tcp_only=flag(s.get("tcp_only")),
                train=flag(s.get("train")),
                trainer=_texts(s.get("trainer")),
            )
        except (OSError, BadValue) as e:
            raise SetupError(f"{file} cannot be read ({e}); join the swarm again with an invitation.") from None


def _texts(said: object) -> tuple[str, ...]:
    return tuple(text(one, MOST_TEXT) for one in items(said, MOST_TEXTS))


def folder_of(run_dir: RunDir) -> Path:
    return run_dir.path / FOLDER
