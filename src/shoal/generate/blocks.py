"""Whose the blocks of keys and values are: a block holds those of 16 tokens that follow each other.

A sequence holds a list of blocks. One that is full is known by all tokens up to its end, so that another sequence that
begins with the same tokens takes it as it is (the prefix cache). Only full blocks are shared, and nobody writes to a
full block: so nothing is ever copied. What nobody holds stays known until its room is needed, the longest unused first.

What is known is named by a chain of digests that begins with the version of the weights and the adapter: keys and
values of other weights are never found (https://github.com/vllm-project/vllm/issues/42125: blocks of the adapter of
yesterday under the same name). The digest is a cryptographic one: prompts come from strangers.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

SIZE = 16  # tokens of a block


@dataclass
class Held:
    """What one sequence has of the blocks."""

    blocks: list[int]
    cached: int  # its first tokens, whose keys and values were there already: whole blocks
    most: int  # blocks that it may come to
    digest: bytes  # of all tokens in its full blocks
    full: int = 0  # blocks whose digest was made
    tail: list[int] = field(default_factory=list)  # tokens after these that were written


class Blocks:
    def __init__(self, count: int, size: int = SIZE, reuse: bool = True) -> None:
        """`reuse`: whether full blocks are remembered for others."""
        self.count, self.size, self.reuse = count, size, reuse
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._digests: list[bytes | None] = [None] * count  # of those that are known
        self._known: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, and nobody's; the longest unused first
        self._promised = 0  # blocks that live sequences may still take

    @property
    def room(self) -> int:
        """Blocks that nobody holds and nobody was promised."""
        return len(self._free) + len(self._idle) - self._promised

    @property
    def held(self) -> int:
        return self.count - len(self._free) - len(self._idle)

    def admit(
        self, tokens: Sequence[int], most: int, version: str = "", adapter: str = "", reuse: bool = True
    ) -> Held | None:
        """Room for the prompt and at most so many tokens more; None: not now. `reuse`: whether to look for blocks that
        are known (not where the logits of the whole prompt are wanted)."""
        held = Held([], 0, -(-(len(tokens) + most) // self.size), _root(version, adapter))
        # Of the last token at least the logits are wanted, so it is always computed.
        for i in range((len(tokens) - 1) // self.size if reuse else 0):
            digest = _next(held.digest, tokens[i * self.size : (i + 1) * self.size])
            block = self._known.get(digest)
            if block is None:
                break
            held.digest = digest
            held.blocks.append(block)
        idle = sum(self._holders[block] == 0 for block in held.blocks)
        if self.room - idle < held.most - len(held.blocks):
            return None
        for block in held.blocks:
            self._idle.pop(block, None)
            self._holders[block] += 1
        held.full = len(held.blocks)
        held.cached = held.full * self.size
        self._promised += held.most - len(held.blocks)
        return held

    def never(self, tokens: int, most: int) -> bool:
        """Whether so much can never be admitted."""
        return -(-(tokens + most) // self.size) > self.count

    def grow(self, held: Held, length: int) -> bool:
        """Blocks for its first `length` tokens; whether any were added."""
        wanted = -(-length // self.size)
        if wanted > held.most:
            raise ValueError(f"{length} tokens are more than the {held.most * self.size} it was admitted with")
        before = len(held.blocks)
        while len(held.blocks) < wanted:
            held.blocks.append(self._take())
            self._promised -= 1
        return len(held.blocks) > before

    def wrote(self, held: Held, tokens: Sequence[int]) -> None:
        """The keys and values of these tokens, its next ones, are in its blocks."""
        if not self.reuse:
            return
        held.tail += tokens
        while len(held.tail) >= self.size:
            held.digest = _next(held.digest, held.tail[: self.size])
            del held.tail[: self.size]
            block = held.blocks[held.full]
            held.full += 1
            if held.digest not in self._known:  # else another sequence has written the same beside it
                self._known[held.digest] = block
                self._digests[block] = held.digest

    def release(self, held: Held) -> None:
        """It has ended. What others may want of it stays, its end to be given up before its beginning."""
        self._promised -= held.most - len(held.blocks)
        for block in reversed(held.blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._digests[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None
        held.blocks, held.most = [], 0

    def forget(self) -> None:
        """Nothing is known any more; who holds a block goes on."""
        for block in self._known.values():
            self._digests[block] = None
        self._known.clear()
        self._free += self._idle
        self._idle.clear()

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            digest = self._digests[block]
            assert digest is not None
            del self._known[digest]
            self._digests[block] = None
        self._holders[block] = 1
        return block


def _root(version: str, adapter: str) -> bytes:
    both = hashlib.sha256(version.encode()).digest() + hashlib.sha256(adapter.encode()).digest()
    return hashlib.sha256(both).digest()


def _next(digest: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(digest + array("q", tokens).tobytes()).digest()
