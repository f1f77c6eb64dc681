"""A persister's part in the memory tier: a snapshot can be found by a restart, here and on the next node. No torch.

Nothing of this is ever a reason for a save to fail: what does not work is told to the trainer, and the disk has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.checkpoint.error_text import words_of
from shoal.checkpoint.memory.generations import remember, retire
from shoal.checkpoint.memory.neighbour import replicate
from shoal.checkpoint.memory.ram import hold
from shoal.checkpoint.names import Name
from shoal.checkpoint.part import Part, encode_part
from shoal.checkpoint.setup import Setup
from shoal.errors import SetupError, TransientError


class InMemory:
    def __init__(self, setup: Setup, say: Callable[..., None]) -> None:
        self._setup, self._say = setup, say
        self._folder = Path(setup.memory) if setup.memory else None
        self._saved = False
        try:  # held as long as this process lives, which may be longer than its worker: nobody sweeps it meanwhile
            self._hold = hold(self._folder) if self._folder is not None else None
        except (OSError, SetupError) as e:
            self._folder = None
            say("unkept", -1, error=words_of(e), rank=setup.rank)

    def keep(self, name: Name, part: Part, extra: dict[str, Any]) -> None:
        """The checksums are known: from now on it counts."""
        if self._folder is None:
            return
        try:
            if self._saved:  # in this term, and nobody takes a snapshot before that is published: older ones may go
                retire(self._folder, name.term, enough=1)
            remember(self._folder, name, part.rank, encode_part(part), self._extra(extra))
        except OSError as e:
            self._say("unkept", name.step, error=words_of(e), rank=part.rank)

    def copy(self, name: Name, part: Part, extra: dict[str, Any], file: memoryview) -> None:
        """Sends it to the next node, while it stays in its slot."""
        if self._folder is None or self._setup.next_keeper is None:
            return
        token = bytes.fromhex(self._setup.token)
        try:
            where, world = self._setup.next_keeper, self._setup.world
            replicate(where, token, name, part.rank, world, file, encode_part(part), self._extra(extra))
            self._say("copied", name.step)
        except (TransientError, OSError) as e:
            self._say("unkept", name.step, error=words_of(e), rank=part.rank)

    def saved(self) -> None:
        self._saved = True

    def _extra(self, extra: dict[str, Any]) -> bytes | None:
        return json.dumps(extra).encode() if self._setup.rank == 0 else None
