"""How long collectives take: bandwidth and latency, inside a domain of fast links and between domains."""

from __future__ import annotations

import numpy as np

from shoal.plan.case import Cases, Column, Flags
from shoal.plan.constants import Constants


def gather(cases: Cases, c: Constants, whole: Column, size: Column, inner: Column) -> Column:
    """Seconds of an all-gather, or a reduce-scatter, of `whole` bytes over groups of `size` whose members lie `inner`
    devices apart.

    Members of a domain pass on to each other what each of them fetched from its like in the other domains, and all
    network cards take part; the slower of the two sets the pace. What is summed up in a switch goes no faster here:
    only all-reduce gains from that, and nothing in a step is one.
    """
    local = np.clip(np.floor(cases.domain / inner), 1.0, size)
    domains = np.ceil(size / local)
    inside = whole * (1 - 1 / local) / (c.links * np.minimum(cases.link, cases.per_peer * np.maximum(local - 1, 1)))
    outside = whole * (1 - 1 / domains) / (c.nics * cases.nic * local)
    return np.where(size > 1, np.maximum(inside, outside) + _latency(cases, c, size, domains > 1), 0.0)


def exchange(cases: Cases, c: Constants, sent: Column, size: Column, inner: Column, outside: Column) -> Column:
    """Seconds of an all-to-all in which each device sends `sent` bytes, an equal part of it to each of `size`; of what
    is for other domains only a share, `outside`, is on the way."""
    local = np.clip(np.floor(cases.domain / inner), 1.0, size)
    out = 1 - local / size
    inside = sent * (local - 1) / size / np.minimum(cases.link, cases.per_peer * np.maximum(local - 1, 1))
    time = (inside / c.links + sent * out * outside / cases.nic / c.nics) / c.exchange
    latency = c.start_s + c.hops * np.where(out > 0, cases.nic_latency, cases.link_latency) * np.log2(size)
    return np.where(size > 1, time + latency, 0.0)


def hand_over(cases: Cases, c: Constants, sent: Column) -> Column:
    """Seconds to send `sent` bytes to the next stage, by the slowest of those that do: of a pipeline that is longer
    than a domain, one hand-over leaves it."""
    near = cases.devices <= cases.domain
    return (
        sent / np.where(near, c.links * cases.per_peer, c.nics * cases.nic)
        + c.start_s
        + np.where(near, cases.link_latency, cases.nic_latency)
    )


def _latency(cases: Cases, c: Constants, size: Column, leaves: Flags) -> Column:
    """A ring's: as many hops as it has members, each as slow as the slowest of them."""
    return c.start_s + c.hops * np.where(leaves, cases.nic_latency, cases.link_latency) * (size - 1)
