"""What a review looks at: a run with the layout that it would have, and what another one would cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shoal.plan.asked import Asked
from shoal.plan.failures import FailureRate
from shoal.plan.goodput import Goodput, goodput
from shoal.plan.restarts import Style
from shoal.plan.search import Found, priced, search, with_layout
from shoal.plan.verdict import BLOCKING_S, save_s
from shoal.spec.mesh import Layout, Sizes
from shoal.spec.run import Run
from shoal.spec.shape import Shape


@dataclass(frozen=True)
class Subject:
    asked: Asked
    found: Found
    rates: FailureRate
    style: Style

    @property
    def run(self) -> Run:
        """As the run file has it."""
        return self.asked.run

    @property
    def closed(self) -> Run:
        """With this layout and nothing left open."""
        return with_layout(self.asked, self.layout, self.found.recompute)

    @property
    def shape(self) -> Shape:
        return self.asked.shape

    @property
    def layout(self) -> Layout:
        return self.found.layout

    @property
    def sizes(self) -> Sizes:
        return self.found.layout.sizes

    @property
    def micro_batches(self) -> int:
        """Of one data-parallel process in a step, or in a shard of it."""
        return self.asked.work.batch // (self.sizes.dp * self.layout.micro_batch)

    def part(self, name: str) -> float:
        """A part of a step, as a share of it."""
        return self.found.parts.get(name, 0.0) / self.found.seconds

    def best(self, **other: Any) -> Found | None:
        """The planner's best of what was asked with something `other`; None where nothing fits."""
        found = search(replace(self.asked, **other), 1)
        return found[0] if found and found[0].fits else None

    def opened(self, *names: str) -> Found | None:
        """The planner's best where these values of the mesh are left open; None where they are already."""
        named = [name for name in names if getattr(self.run.mesh, name) != "auto"]
        if not named:
            return None
        mesh = self.run.mesh.model_copy(update=dict.fromkeys(named, "auto"))
        return self.best(run=self.run.model_copy(update={"mesh": mesh}))

    def repriced(self, **other: Any) -> Found:
        """This very layout, with something `other`."""
        return priced(replace(self.asked, **other), self.layout, self.found.recompute)

    def gain(self, other: Found) -> float:
        """How much faster the other is, of the same work."""
        return self.found.seconds / other.seconds - 1

    def gain_of_shape(self, shape: Shape, other: Found) -> float:
        """How much more of what a model asks for is computed in a second, of a model that asks for something else."""
        seen = self.asked.seen.seen
        work = shape.flops_per_token_seeing(seen) / self.shape.flops_per_token_seeing(seen)
        return work * self.found.seconds / other.seconds - 1

    def with_batch(self, batch: int) -> Run:
        return self.run.model_copy(update={"train": self.run.train.model_copy(update={"batch": batch})})

    @property
    def nodes(self) -> int:
        """Of one island, which saves for all."""
        return -(-self.asked.island // self.per_node)

    @property
    def per_node(self) -> int:
        return min(self.asked.island, self.asked.machine.node)

    def goodput(
        self, writes_s: float | None = None, blocking_s: float | None = None, every_s: float | None = None
    ) -> Goodput:
        """With failures; as `shoal plan` reckons, but for what is given."""
        writes_s = save_s(self.shape.params, self.nodes) if writes_s is None else writes_s
        blocking_s = min(BLOCKING_S, writes_s) if blocking_s is None else blocking_s
        return goodput(
            self.asked.devices,
            self.per_node,
            self.rates,
            self.style,
            writes_s,
            blocking_s,
            every_s,
            step_s=self.found.seconds,
        )
