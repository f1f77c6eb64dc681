"""What is to be laid out, and on what; and how Shoal's own trainer would do it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shoal.plan.case import Case, Plan
from shoal.plan.constants import Constants, fitted
from shoal.plan.machine import Machine
from shoal.plan.net import Net
from shoal.plan.software import Attention, Software
from shoal.spec.mesh_rules import Work
from shoal.spec.run import Run
from shoal.spec.shape import Shape

# What Shoal's trainer does: SDPA's kernels, FSDP2 or DDP, stages cut by cost, a loss that holds no logits.
TRAINER = Software(
    None,
    Attention.NATIVE,
    hides_tp=False,
    fused=False,
    stream_bytes=4.0,
    host=0.2,  # the loop does not wait for the device but to read the loss (benchmarks/loop_overhead.py: 0.1%)
    logit_bytes=0.0,
    balances=True,
    gathers_once=True,
)
# Passes over the stream of an eager block against a compiled one: each product makes its own copy in 16 bits.
EAGER_PASSES = 3.0


@dataclass(frozen=True)
class Asked:
    run: Run
    shape: Shape
    machine: Machine
    devices: int
    constants: Constants = field(default_factory=fitted)  # of this machine where it was measured, else as fitted

    @property
    def case(self) -> Case:
        compiled = self.run.train.compile
        software = replace(TRAINER, fused=compiled, passes=1.0 if compiled else EAGER_PASSES)
        net = Net.of(self.shape)
        return Case(net, self.machine, software, Plan(), self.devices, self.run.train.batch, self.run.data.seq_len)

    @property
    def work(self) -> Work:
        return replace(Work.of(self.run), shape=self.shape, vocab_size=self.shape.vocab_size, processes=self.devices)
