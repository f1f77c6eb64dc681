"""What is to be laid out, and on what; and how Shoal's own trainer would do it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shoal.plan.case import Case, Plan
from shoal.plan.constants import Constants, fitted
from shoal.plan.documents import Documents, one_document, skips_between
from shoal.plan.island_costs import shards
from shoal.plan.machine import Machine
from shoal.plan.net import Net
from shoal.plan.software import Attention, Software
from shoal.spec.eight_bits import head_in_8_bits
from shoal.spec.mesh.rules import Work
from shoal.spec.run import Run
from shoal.spec.shape import Shape

# What Shoal's trainer does: SDPA's kernels, FSDP2 or DDP, stages cut by cost, a loss that holds no logits.
TRAINER = Software(
    None,
    Attention.NATIVE,
    hides_tp=False,
    fused=False,
    stream_bytes=2.0,
    host=0.2,  # the loop does not wait for the device but to read the loss (benchmarks/loop_overhead.py: 0.1%)
    logit_bytes=0.0,
    balances=True,
    gathers_once=True,
    ring_gradient_bytes=4.0,
    merges=True,
)
# What its own kernels move: logits are read twice and their gradient is written once, in 16 bits; an update reads four
# numbers of each weight and writes three, and clipping reads the gradient before.
LOGIT_MOVED, PARAM_MOVED = 6.0, 32.0
# A number that is made narrow is read in 16 bits and written twice in 8, the second time transposed. With a scale for
# each row it is read once more, for the largest.
CAST_MOVED, CAST_BY_ROWS_MOVED = 4.0, 6.0
# Passes over the stream of an eager block in 16 bits against a compiled one: each operation goes through memory.
EAGER_PASSES = 3.0


@dataclass(frozen=True)
class Asked:
    run: Run
    shape: Shape
    machine: Machine
    devices: int  # of all islands
    constants: Constants = field(default_factory=fitted)  # of this machine where it was measured, else as fitted
    documents: Documents | None = None  # of the data; None: nothing is known of it
    without: tuple[str, ...] = ()  # schedules that the trainer's torch cannot do

    @property
    def island(self) -> int:
        """Devices of one island; all of them where there is only one."""
        return self.devices // self.run.fleet.islands

    @property
    def precision(self) -> str:
        """What the trainer would compute with there."""
        named = self.run.train.precision
        return ("fp32" if self.machine.cpu else "bf16") if named == "auto" else named

    @property
    def compiled(self) -> bool:
        """Whether blocks would be compiled there: left open, it is as the trainer decides."""
        named = self.run.train.compile
        return named if isinstance(named, bool) else not (self.machine.cpu or self.shape.experts)

    @property
    def seen(self) -> Documents:
        """What attention has to do for a token."""
        return self.documents or one_document(self.shape, self.run.data.seq_len)

    @property
    def computed(self) -> float | None:
        """Tokens that attention computes for each; None: half a window, whatever the documents."""
        skips = skips_between(self.run, self.shape, not self.machine.cpu, self.precision)
        return self.seen.computed if skips else None

    @property
    def peak(self) -> float:
        """FLOP/s of one device that MFU is a share of."""
        return self.machine.peak32 if self.precision == "fp32" else self.machine.peak

    @property
    def case(self) -> Case:
        """One island's, with all of the batch."""
        compiled, precision = self.compiled, self.precision
        passes = 1.0 if compiled or precision == "fp32" else EAGER_PASSES
        stream_bytes = 4.0 if precision == "fp32" else TRAINER.stream_bytes
        software = replace(TRAINER, fused=compiled, passes=passes, stream_bytes=stream_bytes)
        if not self.machine.cpu and precision != "fp32" and self.run.train.kernels != "plain":
            software = replace(
                software,
                logit_moved=LOGIT_MOVED,
                param_moved=PARAM_MOVED - (8.0 if self.run.train.optimizer.moments == "bf16" else 0.0),
                cast_moved=CAST_BY_ROWS_MOVED if self.run.train.fp8_scaling == "row" else CAST_MOVED,
                narrow_head=head_in_8_bits(self.run, self.shape),
            )
        batch, seq = self.run.train.batch, self.run.data.seq_len
        net = Net.of(self.shape)
        return Case(net, self.machine, software, Plan(), self.island, batch, seq, precision, self.computed)

    @property
    def work(self) -> Work:
        """What a mesh has to carry: an island's, of one shard."""
        return replace(
            Work.of(self.run),
            shape=self.shape,
            vocab_size=self.shape.vocab_size,
            processes=self.island,
            batch=self.run.train.batch // (shards(self.run) or 1),
        )
