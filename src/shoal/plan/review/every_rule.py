"""Asks every rule about a run on so many devices, and about several numbers of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.plan.asked import Asked
from shoal.plan.failures import FailureRate
from shoal.plan.restarts import Style
from shoal.plan.review import (
    attention_waste,
    batch_size,
    expert_split,
    headroom,
    muon_work,
    own_mesh,
    refused,
    save_interval,
    slow_links,
    stage_cut,
    widths,
)
from shoal.plan.review.finding import Finding, order
from shoal.plan.review.subject import Subject
from shoal.plan.search import Found, search

Rule = Callable[[Subject], Iterator[Finding]]

# By what is looked at, as a sentence names it.
RULES: dict[str, tuple[Rule, ...]] = {
    "the mesh beside the planner's best": (own_mesh.slower_mesh,),
    "pipeline stages": (stage_cut.uneven_stages, stage_cut.bubble, stage_cut.tied_over_stages),
    "links": (
        slow_links.tensor_over_nodes,
        slow_links.sequence_traffic,
        slow_links.narrow_heads,
        slow_links.islands_apart,
    ),
    "widths and vocabulary": (
        widths.unaligned,
        widths.head_in_16_bits,
        widths.partly_filled_tiles,
        widths.odd_heads,
    ),
    "experts": (
        expert_split.unsplit_experts,
        expert_split.expert_traffic,
        expert_split.thin_experts,
        expert_split.dense_in_disguise,
    ),
    "memory and recomputing": (headroom.needless_recompute, headroom.dear_recompute, headroom.nothing_left_to_drop),
    "attention": (attention_waste.unseen_tokens,),
    "the batch": (batch_size.small_batch,),
    "the optimizer": (muon_work.muon_work,),
    "saves and failures": (save_interval.saves, save_interval.waiting_for_saves, save_interval.failures),
}
LOOKED_AT = ("what the rules of a mesh refuse", *RULES)


@dataclass(frozen=True)
class Reviewed:
    asked: Asked
    found: Found | None  # the layout that was looked at; None where there is none
    findings: tuple[Finding, ...]  # the worst first

    @property
    def works(self) -> bool:
        return self.found is not None and self.found.fits

    @property
    def tokens_s(self) -> float:
        """A device."""
        assert self.found is not None
        run = self.asked.run
        return run.train.batch * run.data.seq_len / self.found.seconds / self.asked.devices

    @property
    def mfu(self) -> float:
        return self.tokens_s * self.asked.shape.flops_per_token_seeing(self.asked.seen.seen) / self.asked.peak


def review(asked: Asked, rates: FailureRate, style: Style, ask_rules: bool = True) -> Reviewed:
    """The mesh of the run file, with what it leaves open as the planner would close it."""
    found = search(asked, 1)
    if not found:
        return Reviewed(asked, None, (refused.by_the_rules(asked),))
    if not found[0].fits:
        return Reviewed(asked, found[0], (refused.by_memory(asked, found[0]),))
    if not ask_rules:
        return Reviewed(asked, found[0], ())
    subject = Subject(asked, found[0], rates, style)
    seen = [replace(one, devices=asked.devices) for rules in RULES.values() for rule in rules for one in rule(subject)]
    return Reviewed(asked, found[0], tuple(sorted(seen, key=order)))


def merged(reviews: Sequence[Reviewed]) -> list[tuple[Finding, list[int]]]:
    """Each finding where it is worst, with the numbers of devices that it was seen on. What is refused is only said
    where nothing works at all: by the largest number, which has the most memory."""
    working = [one for one in reviews if one.works]
    if not working:
        return [(finding, [reviews[-1].asked.devices]) for finding in reviews[-1].findings]
    by_rule: dict[str, list[Finding]] = {}
    for one in working:
        for finding in one.findings:
            by_rule.setdefault(finding.rule, []).append(finding)
    worst = [(min(same, key=order), [finding.devices for finding in same]) for same in by_rule.values()]
    return sorted(worst, key=lambda pair: order(pair[0]))
