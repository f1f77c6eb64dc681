"""What a peer's compute must be able to do. The network's side knows nothing else of it: messages are bytes."""

from __future__ import annotations

from typing import Protocol

from shoal.stages.report import Measured
from shoal.stages.routes import Commit, Sums


class Work(Protocol):
    """One stage's layers on this peer. Called from one thread, one call at a time."""

    micro_batches: int  # of each step
    message_bytes: int  # the most that hidden states or their gradients of a micro-batch take
    part_bytes: int  # the most that a summed gradient takes
    state_bytes: int  # the most that weights and optimizer take
    held_out: int  # micro-batches of held-out data; 0: there is none
    sets: int  # of held-out data

    def begin(self, step: int) -> None:
        """A step from its beginning: what was summed up so far is of no use."""
        ...

    def forward(self, m: int, message: bytes | None) -> bytes | None:
        """Hidden states of the stage before (the first has none) to those for the next. The last stage gives the
        gradient for the one before instead, having gone forwards and backwards."""
        ...

    def backward(self, m: int, message: bytes) -> bytes | None:
        """The gradient from the next stage to that for the one before (the first gives none)."""
        ...

    def check(self, kind: str, payload: bytes | memoryview) -> None:
        """`BadValue` for what no neighbour ("act", "grad") and no sibling ("part") sends: of another size, or infinite,
        or NaN. Touches nothing, and may be called by any thread: it is asked where a message arrives."""
        ...

    def part(self) -> bytes:
        """The gradient of this peer's micro-batches of the step, for its siblings. May be asked for again when there
        have been more of them."""
        ...

    def total(self, parts: list[bytes] | None) -> float:
        """Sums the siblings' parts in the order given (None: there is this peer alone) and keeps the sum for `apply`.
        Returns the square of its norm."""
        ...

    def loss(self) -> float:
        """Summed over the targets of this peer's micro-batches of the step; 0 where the last stage is elsewhere."""
        ...

    def factor(self, step: int, squares: float, loss: float) -> Commit:
        """What the step does, from all stages' squares and the summed loss. A pure function, asked of the lead.
        Raises NumericsError for what is not finite."""
        ...

    def apply(self, commit: Commit) -> None:
        """Takes the step with the sum that `total` has left."""
        ...

    def measure(self, m: int, message: bytes | None) -> tuple[bytes | None, Measured | None]:
        """A micro-batch of held-out data, forwards: hidden states for the next stage; of the last one the loss. Touches
        nothing of the step."""
        ...

    def add_up(self, sums: Sums | None, step: int, measured: list[Measured]) -> Sums:
        """Adds losses of held-out data to the sums so far. A pure function, asked of the lead."""
        ...

    def tell(self, sums: Sums) -> None:
        """Held-out data is measured after `sums.step` steps: for the journal, and for the checkpoint of that step."""
        ...

    def digest(self) -> str:
        """Of the state after the steps so far: siblings have the same."""
        ...

    def state(self) -> bytes:
        """Weights and optimizer, for a sibling."""
        ...

    def restore(self, step: int, state: bytes) -> None:
        """A sibling's `state`. `BadValue` for what is none; the one that is here is then as it was."""
        ...

    def save(self, step: int) -> None:
        """For the case that all of a stage's peers are lost."""
        ...

    def saved(self) -> list[int]:
        """Steps that `load` can go back to; 0, the beginning, always is one."""
        ...

    def load(self, step: int) -> None: ...
