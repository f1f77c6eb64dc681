"""Bytes that a step must take through a device's memory, by the cost model's own formulas: for achieved bandwidth.

What is counted: each product reads both its matrices and writes its result once, forwards and twice backwards; norms,
activations and the loss as `shoal.plan.step` has them; the update's weights, gradients and moments. Attention keeps its
scores to itself, so its inputs and results are the products' beside it. What a kernel reads twice is not counted: the
share of the bandwidth is what the step achieved of what it needed, not what a counter of the device would show.
"""

from __future__ import annotations

import numpy as np

from shoal.plan.asked import Asked
from shoal.plan.case import Cases, Column
from shoal.plan.catalogue import Device
from shoal.plan.constants import Constants
from shoal.plan.footprint import recomputed
from shoal.plan.machine import Machine
from shoal.plan.search import cases_of
from shoal.plan.step import elementwise_bytes, logit_bytes, update_bytes
from shoal.spec.mesh import Layout
from shoal.spec.run import Run
from shoal.spec.shape import Shape


def moved_bytes(run: Run, shape: Shape, device: Device) -> float:
    """Of one device in one step of a run with nothing left open."""
    layout = Layout.of(run.mesh)
    asked = Asked(run, shape, Machine.of(device), int(run.resources.processes) * run.fleet.islands)
    return float(moved(cases_of(asked, [layout], [str(run.mesh.recompute)]), asked.constants)[0])


def moved(cases: Cases, c: Constants) -> Column:
    products, others = _products(cases), elementwise_bytes(cases, c)
    again = 1 + recomputed(cases) / 3  # forwards is a third of either
    blocks = cases.layers / cases.pp * (products + others) * again
    ends = (_linear(cases, cases.tokens, cases.vocab / cases.tp, cases.dim) + logit_bytes(cases, c)) / cases.pp
    return cases.micro_batches * (blocks + ends) + update_bytes(cases, c)


def _products(cases: Cases) -> Column:
    m, tp, d = cases.tokens, cases.tp, cases.dim
    attention = _linear(cases, m, (cases.q_dim + 2 * cases.kv_dim) / tp, d) + _linear(cases, m, d, cases.q_dim / tp)
    attention = attention * cases.mixer_share
    share = cases.sparse_layers / cases.layers
    dense = _feed_forward(cases, m, cases.ffn_dim / tp)
    own = np.maximum(cases.experts / np.maximum(cases.ep, 1), 1.0)
    each = _feed_forward(cases, m / tp * cases.top_k / own, cases.expert_dim)
    sparse = own * each + _feed_forward(cases, m, cases.shared * cases.expert_dim / tp)
    return attention + dense * (1 - share) + sparse * share


def _feed_forward(cases: Cases, rows: Column, width: Column) -> Column:
    up = _linear(cases, rows, (cases.matrices - 1) * width, cases.dim)
    return up + _linear(cases, rows, cases.dim, width)


def _linear(cases: Cases, rows: Column, out: Column, inside: Column) -> Column:
    """Three products of the same three matrices."""
    return 3 * cases.wide * (rows * out + out * inside + rows * inside)
