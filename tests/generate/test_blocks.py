"""Blocks of keys and values: none is lost, none is written by two, and what is found is of the right tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.generate.blocks import Blocks, Held

SIZE = 4


@dataclass
class Sequence:
    held: Held
    tokens: list[int]
    version: str
    adapter: str
    written: int
    most: int  # tokens


class Machine(RuleBasedStateMachine):
    """The allocator beside a memory that says what really stands in every block."""

    @initialize(count=st.integers(1, 12))
    def start(self, count: int) -> None:
        self.blocks = Blocks(count, SIZE)
        self.memory: list[list[object]] = [[None] * SIZE for _ in range(count)]
        self.live: list[Sequence] = []
        self.version = 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        most=st.integers(0, 12),
        adapter=st.sampled_from("ab"),
    )
    def admit(self, tokens: list[int], most: int, adapter: str) -> None:
        version = str(self.version)
        room = self.blocks.room
        held = self.blocks.admit(tokens, most, version, adapter)
        if held is None:
            assert room < -(-(len(tokens) + most) // SIZE)
            return
        assert held.cached < len(tokens)
        for at in range(held.cached):  # the whole past counts, not the token alone
            found = self.memory[held.blocks[at // SIZE]][at % SIZE]
            assert found == (version, adapter, tuple(tokens[: at + 1]))
        self.live.append(Sequence(held, tokens, version, adapter, held.cached, len(tokens) + most))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), chunk=st.integers(1, 9), drawn=st.integers(0, 1))
    def write(self, data: st.DataObject, chunk: int, drawn: int) -> None:
        """A chunk of the prompt, or one token that was drawn."""
        one = data.draw(st.sampled_from(self.live))
        if one.written == len(one.tokens):
            if len(one.tokens) == one.most:
                return
            one.tokens = [*one.tokens, drawn]
        new = one.tokens[one.written : one.written + chunk]
        self.blocks.grow(one.held, one.written + len(new))
        for at in range(one.written, one.written + len(new)):
            block = one.held.blocks[at // SIZE]
            assert sum(block in other.held.blocks for other in self.live) == 1, "nobody else reads what is written"
            self.memory[block][at % SIZE] = (one.version, one.adapter, tuple(one.tokens[: at + 1]))
        self.blocks.wrote(one.held, new)
        one.written += len(new)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """It has ended, or was cancelled: at any time."""
        one = data.draw(st.sampled_from(self.live))
        self.live.remove(one)
        self.blocks.release(one.held)

    @rule(forget=st.booleans())
    def new_weights(self, forget: bool) -> None:
        self.version += 1
        if forget:
            self.blocks.forget()

    @invariant()
    def every_block_is_counted(self) -> None:
        if not hasattr(self, "blocks"):
            return
        b = self.blocks
        holders = [sum(block in one.held.blocks for one in self.live) for block in range(b.count)]
        assert holders == b._holders
        free, idle = set(b._free), set(b._idle)
        assert len(free) == len(b._free)
        assert not free & idle
        assert free | idle == {block for block in range(b.count) if not holders[block]}
        assert {b._digests[block] for block in idle} <= set(b._known)
        assert all(b._digests[block] == digest for digest, block in b._known.items())
        assert sum(digest is not None for digest in b._digests) == len(b._known)
        assert b._promised == sum(one.held.most - len(one.held.blocks) for one in self.live)
        assert b.room >= 0
        for one in self.live:  # what it wrote or found is still there
            for at in range(one.written):
                block = one.held.blocks[at // SIZE]
                assert self.memory[block][at % SIZE] == (one.version, one.adapter, tuple(one.tokens[: at + 1]))

    def teardown(self) -> None:
        if hasattr(self, "blocks"):
            for one in self.live:
                self.blocks.release(one.held)
            assert self.blocks.held == 0
            assert self.blocks.room == self.blocks.count


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_no_block_is_lost_shared_while_it_is_written_or_found_for_other_tokens = Machine.TestCase


def test_a_prompt_that_was_seen_is_found_but_for_its_last_token() -> None:
    blocks = Blocks(8, SIZE)
    tokens = list(range(2 * SIZE))
    first = blocks.admit(tokens, 1)
    assert first is not None
    assert first.cached == 0
    blocks.grow(first, len(tokens))
    blocks.wrote(first, tokens)
    again = blocks.admit(tokens, 1)
    assert again is not None
    assert again.cached == SIZE
    assert again.blocks == first.blocks[:1]
    other = blocks.admit(tokens, 1, version="of later weights")
    assert other is not None
    assert other.cached == 0


def test_the_longest_unused_goes_first_and_the_end_of_a_text_before_its_beginning() -> None:
    blocks = Blocks(4, SIZE)
    for start in (0, 100):
        held = blocks.admit(range(start, start + 2 * SIZE), 0)
        assert held is not None
        blocks.grow(held, 2 * SIZE)
        blocks.wrote(held, range(start, start + 2 * SIZE))
        blocks.release(held)
    third = blocks.admit(range(200, 200 + SIZE), 0)
    assert third is not None
    blocks.grow(third, SIZE)  # takes the second block of the first text
    found = blocks.admit(range(2 * SIZE), 0)
    assert found is not None
    assert found.cached == SIZE
    later = blocks.admit(range(100, 100 + 2 * SIZE), 0, reuse=False)
    assert later is None  # three are held or promised


def test_nobody_takes_more_than_was_promised() -> None:
    blocks = Blocks(4, SIZE)
    held = blocks.admit([1, 2, 3], 2)
    assert held is not None
    assert blocks.room == 2
    with pytest.raises(ValueError, match="admitted with"):
        blocks.grow(held, 3 * SIZE)
    assert blocks.never(16, 1)
    assert not blocks.never(16, 0)
