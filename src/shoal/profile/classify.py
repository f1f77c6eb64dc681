"""The kind of one piece of work: from its phase, its own name, the operators around it, and the forward operator that
its backward node belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shoal.profile.kinds import (
    ATTENTION,
    COMMUNICATION,
    COPY,
    ELEMENTWISE,
    LOSS,
    MATMUL,
    NORM,
    OPTIMIZER,
    UNACCOUNTED,
    is_around,
    kind_of_name,
)
from shoal.profile.least_work import shapes
from shoal.profile.trace import Event, Trace

UPDATES = ("clip", "optimizer")  # phases of the loop whose work is the optimizer's, whatever it is made of
_REFINES = (ATTENTION, LOSS, NORM, OPTIMIZER)  # what operators around elementwise work can make of it


def classify(trace: Trace, names: Iterable[str], operator: Event | None, phase: str | None) -> str:
    """`names`: of the kernel, then of the operator that launched it. `operator`: where to look further."""
    own = [kind for kind in map(kind_of_name, names) if kind]
    if own and own[0] == COMMUNICATION:
        return COMMUNICATION
    if phase in UPDATES:
        return OPTIMIZER
    if own and own[0] == COPY:
        return COPY
    around = [] if operator is None else [k for k in map(kind_of_name, _names_around(trace, operator)) if k in _REFINES]
    if MATMUL in own and ATTENTION not in around:  # attention without a kernel of its own is made of products
        return MATMUL
    specific = next((kind for kind in own if kind not in (ELEMENTWISE, MATMUL)), None)
    if specific:
        return specific
    if operator is not None and _over_vocabulary(operator, trace):
        return LOSS
    return (around or own or [UNACCOUNTED])[0]


def _names_around(trace: Trace, operator: Event) -> Iterator[str]:
    """Outwards from the operator; where that leads to a backward node, also from its forward operator."""
    for event in operator.around():
        if event.cat == "cpu_op":
            yield event.name
        number = event.args.get("Sequence number")
        if number is not None and event.args.get("Fwd thread id"):
            recorded = trace.forward.get(int(number))
            if recorded is not None:
                yield from (e.name for e in recorded.around() if e.cat == "cpu_op")
            return


def _over_vocabulary(operator: Event, trace: Trace) -> bool:
    """Logits are the only tensors whose rows are as long as the vocabulary; weights of the head have it first."""
    vocabulary, dim = trace.about.get("vocab_size"), trace.about.get("dim")
    if not vocabulary or vocabulary == dim or is_around(operator.name):
        return False
    return any(len(dims) > 1 and dims[-1] == vocabulary for dims, _ in shapes(operator))
