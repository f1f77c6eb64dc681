"""The memory tier as a rank has it: its node's folder in RAM, the keepers of the others, and where its copies go.

tier = join_memory(run_directory)     all ranks together
with tier.stores(durable) as memory:  to restore from: [*memory, *durable]
tier.settle(restored)                 all ranks have read
tier.next_keeper                      where saves send their copies
tier.leave(forget)
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.error_text import words_of
from shoal.checkpoint.find import Found
from shoal.checkpoint.memory import keeper
from shoal.checkpoint.memory.neighbour import Peer
from shoal.checkpoint.memory.ram import Hold
from shoal.checkpoint.memory.tier import Memory, forget, hold, memory_folder, open_folder, settle
from shoal.checkpoint.store import Store
from shoal.parallel import agree
from shoal.ways import own_address


@dataclass(frozen=True)
class Tier:
    folder: Path
    token: bytes
    addresses: dict[int, str]  # node → its keeper's; empty where there is one node
    node: int
    first: bool  # of the node's ranks: it looks after the folder
    hold: Hold
    started: keeper.Started | None

    @property
    def next_keeper(self) -> str | None:
        """Where copies go: to the next node."""
        nodes = sorted(self.addresses)
        return self.addresses[nodes[(nodes.index(self.node) + 1) % len(nodes)]] if len(nodes) > 1 else None

    @contextmanager
    def stores(self, durable: Sequence[Store]) -> Iterator[list[Memory]]:
        """To restore from; the connections to the other nodes are closed afterwards."""
        others = [Peer(address, self.token) for node, address in self.addresses.items() if node != self.node]
        try:
            yield Memory.tiers(self.folder, others, durable, self.addresses.get(self.node, ""))
        finally:
            for peer in others:
                peer.close()

    def settle(self, restored: Found | None) -> None:
        """What was restored from stays until there is something newer; everything else is of no use any more."""
        if self.first:
            from_memory = restored is not None and isinstance(restored.store, Memory)
            settle(self.folder, restored.name if restored is not None and from_memory else None)

    def leave(self, forget_it: bool) -> None:
        """`forget_it`: all is saved elsewhere. Else it stays, for the next start."""
        if forget_it and self.first:
            if self.started is not None:
                self.started.stop()
            forget(self.folder)
        with contextlib.suppress(OSError):
            self.hold.close()


def join_memory(run: Path) -> Tier | str:
    """Collective. Where the memory of a node cannot be used nobody's is, and the reason comes back on all ranks."""
    node, first = int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("LOCAL_RANK", "0")) == 0
    nodes = sorted({int(text) for text in agree.texts(str(node))})
    token = bytes.fromhex(agree.texts(secrets.token_hex(32))[0])
    held, started, words = None, None, None
    try:
        if first:
            held = open_folder(run, node)
            if len(nodes) > 1:
                started = keeper.start(held.folder, token, own_address(os.environ["MASTER_ADDR"]))
    except Exception as e:  # whatever it is, the others must not wait for this rank
        words = words_of(e)
    if failed := agree.first_error(words):
        return f"the memory of the node of rank {failed[0]} cannot be used: {failed[1]}"
    said = agree.texts(f"{node} {started.address}" if started is not None else "")
    addresses = {int(text.split()[0]): text.split()[1] for text in said if text}
    held = held or hold(memory_folder(run, node))
    return Tier(held.folder, token, addresses, node, first, held, started)
