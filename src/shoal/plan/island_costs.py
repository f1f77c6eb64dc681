"""Islands as costs see them: how a batch is shared out among them, and what they trade after each step. No torch.

An island computes its shards in one go, but one by one where they are kept apart (`fleet.deterministic`) and in a
pipeline. Then each of its processes copies its gradients to the host, in float32, trades them with the processes of the
same number on the other islands, and takes the sum back: with n islands and V bytes of gradients it sends (n-1)/n V to
be added up and as much of the sum, as `shoal.islands.trade` does. Where shards are kept apart, V goes once for each
node of the tree that the island's shards fill.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.plan.machine import Machine
from shoal.spec.island_shards import blocks
from shoal.spec.island_sums import cover
from shoal.spec.run import Run

# Shards for each island, where the run file leaves it open: the others can then share those of one that is gone.
SHARDS_EACH = (4, 3, 2, 1)
# Bytes a second that a process sends while it also receives and adds up, over TCP to its own machine: 1.4 to 2.9 GB/s
# among 2, 4 and 8 of them, on the 16 cores beside an H200 (2026-11).
TRADES = 2e9
# From a GPU into fresh memory of the host, and back (measured there too: 1.6 and 8.7 GB/s).
FROM_GPU, TO_GPU = 1.6e9, 8.7e9


@dataclass(frozen=True)
class Share:
    """What the island with the most to do computes of a step."""

    windows: int  # at once
    passes: int  # one after the other


@dataclass(frozen=True)
class Trade:
    sent_bytes: float  # by a process, in a step
    seconds: float


def shards(run: Run) -> int | None:
    """Parts that a batch is cut into; None where it cannot be."""
    islands, batch = run.fleet.islands, run.train.batch
    if islands == 1:
        return 1
    if run.fleet.shards != "auto":
        return None if batch % run.fleet.shards or run.fleet.shards < islands else run.fleet.shards
    return next((islands * k for k in SHARDS_EACH if batch % (islands * k) == 0), None)


def share(run: Run, pipeline: bool) -> Share:
    """Of a run whose batch can be cut."""
    cut = shards(run)
    assert cut is not None
    windows, most = run.train.batch // cut, -(-cut // run.fleet.islands)
    if pipeline or run.fleet.deterministic:
        return Share(windows, most)
    return Share(windows * most, 1)


def trade(run: Run, gradient_bytes: float, machine: Machine, devices: int) -> Trade:
    """Of processes with so many bytes of gradients each, on all `devices` of the islands together."""
    islands, cut = run.fleet.islands, shards(run)
    if islands == 1 or cut is None:
        return Trade(0.0, 0.0)
    vectors = 1
    if run.fleet.deterministic:
        vectors = max(len(cover(block, cut)) for block in blocks(cut, islands))
    sent = (islands - 1) / islands * gradient_bytes * (vectors + 1)
    rate = TRADES if devices <= machine.node else min(TRADES, machine.nic)
    copies = 0.0 if machine.cpu else gradient_bytes * (vectors / FROM_GPU + 1 / TO_GPU)
    return Trade(sent, sent / rate + copies)
