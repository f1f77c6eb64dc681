"""Ways to keep peers together, all of them trained side by side as one stack of decoders: on a GPU a swarm of eight
takes thousands of rounds in a minute.

The same as `benchmarks.fleet.swarm_sim`, which has Shoal's own objects (a test compares the two): peers of a way train
`every` steps, hand in their parts, go on, and move when the record comes, `delay` steps later. No part is left out or
clipped here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from benchmarks.fleet.stacked_model import Stack, Steps
from benchmarks.fleet.stacked_parts import arrives
from benchmarks.fleet.swarm_sim import Sea
from torch import Tensor

from shoal.codec import codec
from shoal.data.windows import Windows
from shoal.spec.shape import shape_of
from shoal.swarm.outer.rule import Rule
from shoal.train.evaluate import all_windows
from shoal.train.schedule import lr_ratio

SEEN = 512  # windows of the trained text that the ends are measured on
AHEAD = 64  # steps whose windows are looked up together


@dataclass(frozen=True)
class Course:
    """How the peers of one row of the table keep together; without a rule by every gradient."""

    name: str
    lr: float
    rule: Rule | None = None
    every: int = 1
    delay: int = 0
    ring: bool = False  # parts are added up on their way


@dataclass
class End:
    loss: float  # on text that was held out
    trained: float  # on text that it was trained on
    bytes_per_step: float  # that each peer sends
    curve: list[float]  # of training, a mean for each hundredth of the run


class _Peers:
    """The rows of one way that has rounds."""

    def __init__(self, course: Course, rule: Rule, stack: Stack, where: slice) -> None:
        self.course, self.rule, self.stack, self.where = course, rule, stack, where
        peers = where.stop - where.start
        self.theta = stack.first.clone()
        self.momentum = torch.zeros_like(self.theta)
        self.residual = torch.zeros(peers, stack.count, device=stack.device)
        self.assumed: list[tuple[int, slice, Tensor, Tensor]] = []  # when it comes, where, own progress, the mean part
        self.round = 0
        self.samples: list[Tensor] = []

    @torch.no_grad()
    def end_round(self, t: int) -> None:
        rule, at = self.rule, self.rule.fragment(self.round, self.stack.count)
        stand = self.theta[at].expand(self.residual.shape[0], -1)
        for _, there, assumed, _ in self.assumed:
            if there == at:
                stand = stand + assumed
        progress = stand - self.stack.weights[self.where, at]
        full = progress + rule.feedback * self.residual[:, at] if rule.feedback else progress
        sent = arrives(rule, full)
        if rule.feedback:
            self.residual[:, at] = full - sent
        self.assumed.append((t + self.course.delay, at, -progress, sent.mean(0)))
        self.samples = [*self.samples, full[0]][-rule.fragments :]
        self.round += 1

    @torch.no_grad()
    def follow(self, t: int, all_of_it: bool = False) -> None:
        while self.assumed and (all_of_it or self.assumed[0][0] <= t):
            _, at, assumed, mean = self.assumed.pop(0)
            if self.rule.momentum:
                m = self.momentum[at]
                m.mul_(self.rule.momentum).add_(mean)
                mean = mean + self.rule.momentum * m
            moved = -self.rule.lr * mean
            self.theta[at] += moved
            self.stack.weights[self.where, at] += moved - assumed

    def bytes_of_part(self) -> float:
        """Of the last one, or the mean of each fragment's last."""
        code = codec(self.rule.codec, chunk=self.rule.chunk, keep=self.rule.keep)
        return float(np.mean([len(code.encode(part.cpu().numpy())) for part in self.samples]))


def sail(
    sea: Sea, courses: Sequence[Course], device: torch.device, tell: Callable[[int], None] = lambda step: None
) -> list[End]:
    """Trains all of them from the same weights on the same windows; those without rounds come first."""
    size, train = sea.size, sea.run.train
    together = sum(c.rule is None for c in courses)
    assert all(c.rule is None for c in courses[:together])
    stack = Stack(shape_of(sea.run.model), len(courses) * size.peers, size.seq_len, sea.run.seed, device)
    steps = Steps(stack, train.optimizer, train.clip or 1e30, size.peers, together)
    slices = [slice(i * size.peers, (i + 1) * size.peers) for i in range(len(courses))]
    peers = [_Peers(c, c.rule, stack, at) for c, at in zip(courses, slices, strict=True) if c.rule is not None]
    rates = torch.tensor([[c.lr] for c in courses for _ in range(size.peers)], device=device)
    step = _Step(steps, rates, _whole(sea.windows, device), size.batch, device)
    curve = torch.zeros(100, len(courses), device=device)
    batch = size.batch * size.peers
    for t in range(size.steps):
        if t % AHEAD == 0:
            tell(t)
            n = min(AHEAD, size.steps - t)
            ids = _places(sea.windows, *sea.order.at(t * batch, n * batch))
            ahead = torch.from_numpy(ids.reshape(n, size.peers, size.batch)).to(device)
        for one in peers:
            one.follow(t)
        b1, b2 = train.optimizer.betas
        losses = step(ahead[t % AHEAD], lr_ratio(train.schedule, t, size.steps), 1 - b1 ** (t + 1), 1 - b2 ** (t + 1))
        curve[t * 100 // size.steps] += losses.view(len(courses), -1).mean(1) / (size.steps / 100)
        for one in peers:
            if (t + 1) % one.course.every == 0 or t + 1 == size.steps:
                one.end_round(t + 1)
    for one in peers:
        one.follow(size.steps, all_of_it=True)
    ends = torch.stack([stack.weights[at.start] for at in slices[:together]] + [p.theta for p in peers])
    found = _loss(stack, ends, sea.held_out, sea.run.eval.windows, device)
    trained = _loss(stack, ends, sea.windows, SEEN, device)
    return [
        End(
            found[i],
            trained[i],
            _traffic(course, peers[i - together] if course.rule else None, stack.count, size.peers, size.steps),
            curve[:, i].tolist(),
        )
        for i, course in enumerate(courses)
    ]


def _traffic(course: Course, one: _Peers | None, count: int, peers: int, steps: int) -> float:
    ring = 2 * (peers - 1) / peers
    if one is None:
        return ring * 2 * count
    return (ring if course.ring else peers - 1) * one.bytes_of_part() * one.round / steps


class _Step:
    """One step of the stack. On a GPU it is compiled, recorded once, and played again."""

    def __init__(
        self, steps: Steps, rates: Tensor, windows: tuple[Tensor, Tensor], batch: int, device: torch.device
    ) -> None:
        peers = steps.peers
        self._steps, self._rates, self._windows = steps, rates, windows
        self._ids = torch.zeros(peers, batch, dtype=torch.int64, device=device)
        self._ratio, self._fixed = torch.zeros(1, device=device), torch.ones(2, device=device)
        self._ways = steps.stack.rows // peers
        self._graph: torch.cuda.CUDAGraph | None = None
        self._losses = torch.zeros(0)
        if device.type == "cuda":
            steps.losses, steps.update = torch.compile(steps.losses), torch.compile(steps.update)
            self._record()

    def __call__(self, ids: Tensor, ratio: float, fixed1: float, fixed2: float) -> Tensor:
        self._ids.copy_(ids)
        self._ratio.fill_(ratio)
        self._fixed[0], self._fixed[1] = fixed1, fixed2
        if self._graph is None:
            return self._once()
        self._graph.replay()
        return self._losses

    def _once(self) -> Tensor:
        tokens, targets = (w[self._ids].repeat(self._ways, 1, 1) for w in self._windows)
        losses, grad = self._steps.gradient(tokens.long(), targets.long())
        self._steps.update(grad, self._rates, self._ratio, self._fixed)
        return losses

    def _record(self) -> None:
        """With a rate of nothing, so that weights stay; moments are cleared after."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._once()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._losses = self._once()
        for moments in (self._steps.m, self._steps.v, self._steps.momentum):
            if moments is not None:
                moments.zero_()


def _whole(windows: Windows, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets of all windows: [windows, seq] each, as `_places` counts them."""
    batch = windows.batch(*all_windows(windows, None))
    tokens, targets = (torch.from_numpy(a.astype(np.int16)).to(device) for a in (batch.tokens, batch.targets))
    return tokens, targets


def _places(windows: Windows, sources: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.cumsum([0, *windows.sizes])[sources] + ids


@torch.no_grad()
def _loss(stack: Stack, ends: Tensor, windows: Windows, limit: int | None, device: torch.device) -> list[float]:
    batch = windows.batch(*all_windows(windows, limit))
    total, targets = torch.zeros(len(ends), dtype=torch.float64, device=device), 0
    for i in range(0, len(batch.tokens), 32):
        tokens, wanted = (
            torch.from_numpy(a[i : i + 32]).to(device).expand(len(ends), -1, -1) for a in (batch.tokens, batch.targets)
        )
        total += stack.losses(ends, tokens, wanted).double()
        targets += int((batch.targets[i : i + 32] >= 0).sum())
    return (total / targets).tolist()
