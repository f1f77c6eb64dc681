"""The memory of a device, part by part, of any framework's run; `shoal.plan.memory` knows Shoal's own to the byte.

State: FSDP keeps weights, gradients and both moments in 32 bits, a share of each. The others compute on a copy in 16
bits, with gradients in 32 or 16, and keep master weights and moments (12 bytes a parameter), sharded or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.plan.case import Cases, Column

# Contexts of the driver and of libraries, buffers of collectives, and the allocator's own losses.
RUNTIME_BYTES = 1e9
# What a plan may fill: the rest is lost to fragments.
USABLE = 0.92


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device that needs the most."""

    weights: Column
    gradients: Column
    optimizer: Column
    activations: Column
    logits: Column
    runtime: Column

    @property
    def total(self) -> Column:
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.logits + self.runtime


def footprint(cases: Cases) -> Footprint:
    again = np.where(np.isnan(cases.dropped), recomputed(cases), cases.dropped)
    dense, sparse = held_params(cases)
    layer = (dense + sparse) / np.maximum(cases.layers / cases.pp, 1)
    held, share = dense + sparse, _state_share(cases, dense, sparse)
    sharded = cases.zero >= 3
    gathered = np.where(cases.shard > 1, 2 * 2 * layer, 2 * layer)  # the layer at work and the next one
    gathered = np.where(cases.gathers_once & (cases.pp > 1), 2 * held, gathered)
    whole = cases.gathers_once & (cases.micro_batches > 1) & ~cases.scatters
    kept = activations(cases, again)
    grads = np.where(cases.narrow_gradients, 2.0, 4.0)
    # Megatron holds one gradient buffer a device; FSDP reduces each layer's at once.
    return Footprint(
        weights=np.where(sharded, 4 * share + gathered, 2 * held),
        gradients=np.where(
            sharded, np.where(whole, 4 * held, 4 * share + 2 * layer), np.where(cases.zero >= 2, share, held) * grads
        ),
        optimizer=np.where(sharded, 8 * share, np.where(cases.zero >= 1, 12 * share, 12 * held)),
        activations=kept,
        logits=_logits(cases),
        runtime=np.full_like(kept, RUNTIME_BYTES),
    )


def held_params(cases: Cases) -> tuple[Column, Column]:
    """Parameters that a device would hold of its stage without sharding by data parallelism: all but routed experts,
    and those."""
    attention = 2 * cases.dim * (cases.q_dim + cases.kv_dim) * cases.mixer_share
    plain = cases.layers - cases.sparse_layers
    expert = cases.matrices * cases.dim * cases.expert_dim
    blocks = cases.layers * attention + plain * cases.matrices * cases.dim * cases.ffn_dim
    blocks = blocks + cases.sparse_layers * (cases.shared * expert + cases.dim * cases.experts)
    ends = cases.vocab * cases.dim * np.where(cases.tied | (cases.pp > 1), 1.0, 2.0)
    routed = cases.sparse_layers * cases.experts * expert / cases.pp / np.maximum(cases.ep, 1)
    # With tensor parallelism inside experts as well, they are shared by more devices than `ep`.
    return (blocks / cases.pp + ends) / cases.tp, routed


def recomputed(cases: Cases) -> Column:
    """Of a layer's forward work, what is done again. Where a case leaves it open: of as few layers as makes it fit."""
    if not np.isnan(cases.recompute).any():
        return cases.recompute
    dense, sparse = held_params(cases)
    share = _state_share(cases, dense, sparse)
    copy = np.where(cases.narrow_gradients, 4.0, 6.0) * (dense + sparse)
    state = np.where(cases.zero >= 3, 16 * share, copy + 12 * np.where(cases.zero >= 1, share, dense + sparse))
    room = USABLE * cases.memory - state - RUNTIME_BYTES - _logits(cases)
    most, least = activations(cases, np.zeros_like(state)), activations(cases, np.ones_like(state))
    needed = np.clip((most - room) / np.maximum(most - least, 1.0), 0.0, 1.0)
    return np.where(np.isnan(cases.recompute), needed, cases.recompute)


def activations(cases: Cases, again: Column) -> Column:
    """Kept for the backward pass, of all micro-batches that are under way on the first stage."""
    d, f = cases.dim, cases.ffn_dim
    inputs = 8 * d + 4 * (cases.q_dim + cases.kv_dim)
    wide = np.where(cases.matrices == 3, np.where(cases.fused, 6.0, 8.0), 4.0)  # bytes a unit of the inner width
    dense = inputs + wide * f
    expert = inputs + cases.top_k * (2 * d + wide * cases.expert_dim) + wide * cases.shared * cases.expert_dim
    scores = np.where(cases.fused_attention, 0.0, 5 * cases.heads * cases.seq)
    share = cases.sparse_layers / cases.layers
    none = (dense * (1 - share) + expert * share + scores) / cases.tp
    full = 2 * d / cases.tp
    flying = np.minimum(cases.micro_batches, cases.pp)
    flying = flying * np.where(cases.chunks > 1, 1 + (cases.pp - 1) / (cases.pp * cases.chunks), 1.0)
    flying = np.where(np.isnan(cases.under_way), flying, cases.under_way)
    layers = cases.layers / cases.pp
    kept = np.where(np.isnan(cases.kept), none * (1 - again) + full * again, cases.kept)
    # One layer at a time is whole again while it goes backwards.
    return cases.tokens * (layers * flying * kept + np.where(again > 0, none, 0.0))


def _state_share(cases: Cases, dense: Column, sparse: Column) -> Column:
    """Parameters whose optimizer state is this device's."""
    over = np.where(cases.zero >= 1, np.maximum(cases.shard, 1), 1.0)
    # A device's experts are also held by those that share everything else with it, but not by their exchange group.
    experts_over = np.maximum(1.0, over * cases.tp / np.maximum(cases.ep, 1))
    return dense / over + sparse / np.where(cases.zero >= 1, experts_over, 1.0)


def _logits(cases: Cases) -> Column:
    """Where there is a pipeline they are on its last stage, which has fewer activations to hold than the first."""
    return np.where(cases.pp > 1, 0.3, 1.0) * cases.logit_bytes * cases.tokens * cases.vocab / cases.tp
