"""The time of an optimizer step, part by part: what is computed, what moves bytes, what waits for other devices.

Nothing here knows a machine or a framework by name. A part is the time that it adds to the step: traffic that goes on
beside work counts only as far as it is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from shoal.plan.case import Cases, Column
from shoal.plan.collectives import exchange, gather, hand_over
from shoal.plan.constants import Constants
from shoal.plan.footprint import held_params, recomputed
from shoal.plan.products import Time, linear, speed

# Kernels of a layer beside its products, forwards and backwards.
SMALL_KERNELS = (8, 12)
# Devices of a node, where one counts who may be late.
LATE = 8
# Bytes through memory for each number of a ring's result and each piece (shoal.parallel.ring: float32 copies of what
# came out, blended into what is there), forwards and backwards, and for each number of its keys' and values' gradients.
MERGED, MERGED_BACKWARD, MERGED_KEYS = 14.0, 8.0, 23.0
# And for each number that is exchanged: it is put in the order of the processes, and back.
ORDERED = 12.0


@dataclass(frozen=True)
class Parts:
    """Seconds of a step."""

    products: Column
    attention: Column
    elementwise: Column
    loss: Column
    recompute: Column
    tensor: Column  # seen of tensor parallelism's traffic
    context: Column
    experts: Column
    pipeline: Column  # stages that wait for the first and the last micro-batch, or for a slower stage
    handover: Column
    data: Column  # seen of data parallelism's traffic
    update: Column
    host: Column
    waiting: Column  # for the slowest

    @property
    def total(self) -> Column:
        return np.sum([getattr(self, f.name) for f in fields(Parts)], axis=0)

    def of(self, row: int) -> dict[str, float]:
        """Of one case."""
        return {f.name: float(getattr(self, f.name)[row]) for f in fields(Parts)}


def step(cases: Cases, c: Constants) -> Parts:
    layers, rounds = cases.layers / cases.pp, cases.micro_batches
    products, attention, elementwise = _products(cases, c), _attention(cases, c), _elementwise(cases, c)
    tensor, context, experts = _tensor(cases, c), _context(cases, c, attention), _experts(cases, c)
    # A ring is one operator with the attention that goes around it; what is exchanged is exchanged again.
    exchanged = np.where(cases.all_to_all, context.forward, 0.0)
    again = recomputed(cases)
    of_attention = np.where(np.isnan(cases.attention_again), again, cases.attention_again)
    again = again * ((products + elementwise + tensor + experts).forward + exchanged)
    again = again + of_attention * (attention.forward + context.forward - exchanged)
    loss = _loss(cases, c)
    block = products.both + attention.both + elementwise.both + tensor.both + context.both + experts.both + again
    stage = layers * block
    # The head is as much work as a few layers more, on the last stage. Where stages are cut by cost all have a share of
    # it, but for what is less than a layer; else the others wait for the last one.
    cut = loss / cases.pp
    left = np.where(cases.balances, np.minimum(loss - cut, block / 2), loss - cut)
    filling = (cases.pp - 1) / cases.chunks * (stage + cut) + rounds * left
    seen = _handover(cases, c)
    compute = rounds * (stage + cut) + filling
    data = _data(cases, c, compute, stage + cut)
    update, host = _update(cases, c), c.host_s * cases.host
    known = compute + seen + data + update + host
    return Parts(
        products=rounds * layers * products.both,
        attention=rounds * layers * attention.both,
        elementwise=rounds * layers * elementwise.both,
        loss=rounds * cut,
        recompute=rounds * layers * again,
        tensor=rounds * layers * tensor.both,
        context=rounds * layers * context.both,
        experts=rounds * layers * experts.both,
        pipeline=filling,
        handover=seen,
        data=data,
        update=update,
        host=host,
        waiting=known * c.waiting * np.log2(np.maximum(cases.devices / LATE, 1.0)),
    )


def tokens_per_second(cases: Cases, c: Constants) -> Column:
    """A device."""
    return cases.batch * cases.seq / step(cases, c).total / cases.devices


def _products(cases: Cases, c: Constants) -> Time:
    m, tp, d = cases.tokens, cases.tp, cases.dim
    attention = linear(cases, c, m, (cases.q_dim + 2 * cases.kv_dim) / tp, d) + linear(cases, c, m, d, cases.q_dim / tp)
    attention = attention.times(cases.mixer_share)
    dense = _feed_forward(cases, c, m, cases.ffn_dim / tp)
    share = cases.sparse_layers / cases.layers
    if not share.any():
        return attention + dense
    own = np.maximum(cases.experts / np.maximum(cases.ep, 1), 1.0)
    rows = m / tp * cases.top_k / own * np.maximum(cases.ep, 1) / np.maximum(cases.ep, 1)
    each = _feed_forward(cases, c, np.maximum(rows, 1.0), np.maximum(cases.expert_dim, 1.0))
    # All experts of a device are one grouped product: one launch for all of them.
    grouped = Time(
        own * (each.forward - 2 * c.launch_s) * c.uneven + 2 * c.launch_s,
        own * (each.backward - 4 * c.launch_s) * c.uneven + 4 * c.launch_s,
    )
    shared = _feed_forward(cases, c, m, np.maximum(cases.shared * cases.expert_dim / tp, 1.0))
    sparse = grouped + shared.times(np.where(cases.shared > 0, 1.0, 0.0))
    return attention + dense.times(1 - share) + sparse.times(share)


def _feed_forward(cases: Cases, c: Constants, rows: Column, width: Column) -> Time:
    up = linear(cases, c, rows, (cases.matrices - 1) * width, cases.dim)
    return up + linear(cases, c, rows, cases.dim, width)


def _attention(cases: Cases, c: Constants) -> Time:
    """What a token sees is computed (of one document: half of the square of scores; less where documents are packed),
    forwards twice and backwards five times; where the scores go through memory, all of it."""
    at = speed(cases, c, low=False)
    half = 4 * cases.tokens * cases.seen * cases.q_dim / cases.tp
    share = np.where(cases.native_attention, c.native, c.generic)
    moved = c.score * cases.heads / cases.tp * cases.tokens * cases.seq / (cases.bandwidth * c.achieved)
    forward = np.where(cases.fused_attention, half / (at * share), 2.5 * half / at + moved)
    backward = np.where(cases.fused_attention, 2.5 * half / (at * share), 5 * half / at + 1.5 * moved)
    return Time(forward + c.launch_s, backward + 2 * c.launch_s)


def elementwise_bytes(cases: Cases, c: Constants) -> Column:
    """Through memory, of a micro-batch in a layer: norms, activations, sums."""
    share = cases.sparse_layers / cases.layers
    inner = cases.ffn_dim * (1 - share) + cases.expert_dim * (cases.top_k + cases.shared) * share
    stream = c.stream * cases.dim * cases.passes * cases.stream_bytes / cases.wide
    numbers = stream + c.inner * inner + 8 * (cases.q_dim + cases.kv_dim)
    numbers = numbers * np.where(cases.fused, 1.0, c.unfused) + c.permute * cases.top_k * cases.dim * share
    return (cases.wide * numbers + 3 * cases.mixing_bytes) / cases.tp * cases.tokens


def _elementwise(cases: Cases, c: Constants) -> Time:
    moved = elementwise_bytes(cases, c) / (cases.bandwidth * c.achieved)
    forward, backward = SMALL_KERNELS
    return Time(moved / 3 + forward * c.launch_s, moved * 2 / 3 + backward * c.launch_s)


def _loss(cases: Cases, c: Constants) -> Column:
    about = cases, c, cases.tokens, cases.vocab / cases.tp, cases.dim
    head = linear(*about, low=False).both
    if cases.narrow_head.any():  # with a gradient that is made narrow, so there is no cast
        head = np.where(cases.narrow_head, linear(*about, cast=False).both, head)
    return head + logit_bytes(cases, c) / (cases.bandwidth * c.achieved)


def logit_bytes(cases: Cases, c: Constants) -> Column:
    """Through memory, of a micro-batch."""
    moved = np.where(np.isnan(cases.logit_moved), c.logit, cases.logit_moved)
    return moved * cases.tokens * cases.vocab / cases.tp


def _tensor(cases: Cases, c: Constants) -> Time:
    """Two gathers and two scatters of the stream a layer, in either direction."""
    seen = np.where(cases.hides_tp, 1 - c.beside_tp, 1.0)
    once = gather(cases, c, cases.wide * cases.tokens * cases.dim, cases.tp, np.ones_like(cases.tp))
    return Time(4 * once * seen, 4 * once * seen)


@dataclass(frozen=True)
class Shared:
    """Bytes that a device sends of a micro-batch in a layer for the sequence that it shares: what
    `shoal.plan.traffic` counts. Of a ring or of an exchange; the others are 0."""

    keys: Column  # and values, around the ring: forwards, and backwards again
    gradients: Column  # theirs, backwards
    there: Column  # heads for tokens, before attention; in either direction
    home: Column  # and back, after it

    @staticmethod
    def of(cases: Cases) -> Shared:
        n, q, kv = cases.cp, cases.tokens * cases.q_dim / cases.tp, cases.tokens * cases.kv_dim / cases.tp
        around = np.where(cases.all_to_all, 0.0, (n - 1) * 2 * kv)
        across = np.where(cases.all_to_all, (n - 1) / n * cases.wide, 0.0)
        return Shared(around * cases.wide, around * cases.ring_gradient_bytes, across * (q + 2 * kv), across * q)

    @property
    def forward(self) -> Column:
        return self.keys + self.there + self.home

    @property
    def backward(self) -> Column:
        return self.forward + self.gradients


def _context(cases: Cases, c: Constants, attention: Time) -> Time:
    """By ring, keys and values go round while attention works on those that are there, and their gradients after them.
    By exchange, attention waits for the heads, and what follows waits for its result."""
    sent, n = Shared.of(cases), cases.cp
    whole = n / np.maximum(n - 1, 1.0)  # of what is sent, with what stays
    keys = gather(cases, c, sent.keys * whole, n, cases.tp)
    back = keys * (1 + cases.ring_gradient_bytes / cases.wide)
    q, kv = (cases.tokens * width / cases.tp for width in (cases.q_dim, cases.kv_dim))
    pace = np.where(cases.merges & (n > 1), 1 / (cases.bandwidth * c.achieved), 0.0)
    ring = Time(
        np.maximum(keys - 0.7 * attention.forward, 0.1 * keys) + pace * n * MERGED * q,
        np.maximum(back - 0.7 * attention.backward, 0.1 * back)
        + pace * n * (MERGED_BACKWARD * q + MERGED_KEYS * 2 * kv),
    )
    if not cases.all_to_all.any():
        return ring
    ways = [exchange(cases, c, part * whole, n, cases.tp, np.ones_like(n)) for part in (sent.there, sent.home)]
    once = ways[0] + ways[1] + pace * ORDERED * 2 * (q + kv)
    return Time(np.where(cases.all_to_all, once, ring.forward), np.where(cases.all_to_all, once, ring.backward))


def _experts(cases: Cases, c: Constants) -> Time:
    """Tokens go to their experts and come back, in either direction."""
    share = cases.sparse_layers / cases.layers
    sent = cases.wide * cases.tokens / cases.tp * cases.top_k * cases.dim
    group = np.maximum(cases.ep, 1.0)
    # Of top_k experts, spread over so many domains, how many domains there are: a token has to go there once.
    domains, routed = np.maximum(np.ceil(group / cases.domain), 1.0), np.maximum(cases.top_k, 1.0)
    distinct = domains * (1 - (1 - 1 / domains) ** routed) / routed
    outside = np.where(cases.sends_once, distinct, 1.0)
    once = exchange(cases, c, sent, group, np.ones_like(sent), outside)
    seen = 2 * once * share * np.where(cases.hidden_ep, 0.15, 1 - c.beside_ep)
    return Time(seen, seen)


def _handover(cases: Cases, c: Constants) -> Column:
    once = hand_over(cases, c, cases.wide * cases.tokens * cases.dim / cases.tp)
    times = 2 * cases.chunks * (cases.micro_batches + cases.pp - 1)
    return np.where(cases.pp > 1, c.handover * once * times, 0.0)


def _data(cases: Cases, c: Constants, compute: Column, once: Column) -> Column:
    """FSDP fetches weights twice and gives gradients away with every micro-batch, beside all of the work; the others
    give gradients away and fetch weights once a step, beside one micro-batch. FSDP with gradients that stay whole does
    the one with its weights and the other with its gradients, unless it scatters them with every micro-batch."""
    dense, sparse = held_params(cases)
    held = dense + sparse
    group, inner = cases.dp * cases.cp, cases.tp
    shard = np.minimum(cases.shard, group)
    fetch = gather(cases, c, cases.wide * held, shard, inner)
    give = gather(cases, c, 4 * held, shard, inner)
    copies = group / shard  # beyond those that share one: their gradients are summed up too
    summed = 2 * gather(cases, c, 4 * held / shard, copies, inner * shard)
    rounds, sharded = cases.micro_batches, cases.zero >= 3
    whole = cases.gathers_once & sharded
    scattered = np.where(cases.scatters, rounds * give, 0.0)
    fetched = np.where(cases.pp > 1, 1.0, 2 * rounds) * fetch + scattered
    spread = np.where(sharded, np.where(whole, fetched, 3 * fetch * rounds + summed), 0.0)
    given = np.where(cases.scatters, 0.0, give) + summed
    at_once = np.where(whole, given, np.where(sharded, 0.0, give + fetch + summed))
    last = np.where(cases.hides_dp, once, 0.0)
    felt = np.where(cases.sends_by_units, c.felt, 0.05)
    return _seen(spread, c.beside_dp * compute, felt) + _seen(at_once, c.beside_dp * last, felt)


def _seen(traffic: Column, beside: Column, felt: Column) -> Column:
    """Of traffic that goes on beside some work: never less than what it takes from that work."""
    return np.maximum(traffic - beside, felt * traffic)


def _update(cases: Cases, c: Constants) -> Column:
    return update_bytes(cases, c) / (cases.bandwidth * c.achieved)


def update_bytes(cases: Cases, c: Constants) -> Column:
    """Through memory, of a step: weights, gradients and the optimizer's state."""
    dense, sparse = held_params(cases)
    over = np.where(cases.zero >= 1, np.maximum(cases.shard, 1.0), 1.0)
    moved = np.where(np.isnan(cases.param_moved), c.update, cases.param_moved)
    return moved * (dense + sparse) / over
