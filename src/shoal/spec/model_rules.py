"""What must agree between the values of `model`: for anything to be computed, and for a run to train it."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.spec.families import FAMILIES
from shoal.spec.mesh.rules import Broken
from shoal.spec.model import Experts, Mla, Model
from shoal.spec.run import Run
from shoal.spec.start_values import FROM_THE_SHAPE


def model_rules(run: Run) -> Iterator[Broken]:
    yield from computable(run.model)
    yield from _routers(run.model)
    yield from _start(run.model)


def computable(m: Model) -> Iterator[Broken]:
    """What must agree for a model to compute anything, whoever describes it: a run file or a folder of others."""
    for rule in (_heads, _layers, _rope, _states):
        yield from rule(m)


def _heads(m: Model) -> Iterator[Broken]:
    names = ("model.dim", "model.heads", "model.head_dim")
    if m.mla is not None:
        yield from _latent(m, m.mla)
    elif m.head_dim == "auto" and m.dim % m.heads:
        near = max(m.heads, round(m.dim / m.heads) * m.heads)
        yield names, f"model.dim {m.dim} is not a multiple of model.heads {m.heads}; use {near}, or set model.head_dim"
    elif int(_head_dim(m) * FAMILIES[m.family].rotary) % 2 or _head_dim(m) % 2:
        wide = f"model.head_dim {m.head_dim}" if m.head_dim != "auto" else f"model.dim / model.heads = {_head_dim(m)}"
        if FAMILIES[m.family].rotary == 1:
            yield names, f"{wide} is odd, and rotary positions need an even width; change it"
        else:
            yield (
                names,
                f"{wide} is no multiple of 4, and family {m.family} rotates half of each head; change it",
            )
    if m.kv_heads != "auto" and m.heads % m.kv_heads:
        yield (
            ("model.kv_heads", "model.heads"),
            f"model.kv_heads {m.kv_heads} does not divide model.heads {m.heads}; use one of {_divisors(m.heads)}",
        )


def _latent(m: Model, mla: Mla) -> Iterator[Broken]:
    wide = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if m.head_dim not in ("auto", wide):
        yield (
            ("model.head_dim", "model.mla"),
            f"model.head_dim {m.head_dim} is not the {wide} of model.mla.qk_nope_head_dim and qk_rope_head_dim; "
            "leave it out",
        )
    if m.kv_heads not in ("auto", m.heads):
        yield (
            ("model.kv_heads", "model.mla"),
            f"model.kv_heads {m.kv_heads} is not model.heads {m.heads}, and with model.mla every head has keys of its "
            "own; leave it out",
        )
    if mla.qk_rope_head_dim % 2:
        yield (
            ("model.mla.qk_rope_head_dim",),
            f"model.mla.qk_rope_head_dim {mla.qk_rope_head_dim} is odd, and rotary positions turn pairs; change it",
        )
    if mla.v_head_dim > wide:
        yield (
            ("model.mla.v_head_dim", "model.mla.qk_nope_head_dim"),
            f"model.mla.v_head_dim {mla.v_head_dim} is more than the {wide} of a query's head; lower it",
        )
    if m.mamba is not None:
        yield ("model.mla", "model.mamba"), "model.mla and model.mamba do not go together; remove one"


def _layers(m: Model) -> Iterator[Broken]:
    if m.sliding_window and m.full_attention_layers > m.layers:
        yield (
            ("model.full_attention_layers", "model.layers"),
            f"model.full_attention_layers {m.full_attention_layers} is more than model.layers {m.layers}; lower it",
        )
    for name in ("full_attention_every", "sliding_rope_theta"):
        if getattr(m, name) is not None and m.sliding_window is None:
            yield (
                (f"model.{name}", "model.sliding_window"),
                f"model.{name} is about layers beside those with a model.sliding_window, and there is none; set it, or "
                f"remove model.{name}",
            )
    if m.full_attention_every is not None and m.full_attention_layers:
        yield (
            ("model.full_attention_every", "model.full_attention_layers"),
            "model.full_attention_every and model.full_attention_layers both say which layers see all; remove one",
        )
    if m.experts and m.experts.top_k > m.experts.count:
        yield (
            ("model.experts.top_k", "model.experts.count"),
            f"model.experts.top_k {m.experts.top_k} is more than the {m.experts.count} experts there are; lower it",
        )
    if m.experts:
        yield from _groups(m.experts)
    if m.experts and m.experts.dense_layers >= m.layers:
        yield (
            ("model.experts.dense_layers", "model.layers"),
            f"model.experts.dense_layers {m.experts.dense_layers} leaves no layer of {m.layers} sparse; lower it",
        )


def _groups(e: Experts) -> Iterator[Broken]:
    each, rest = divmod(e.count, e.groups)
    names = ("model.experts.groups", "model.experts.count")
    if rest:
        yield names, f"model.experts.groups {e.groups} does not divide model.experts.count {e.count}; change one"
    elif each < 2:
        yield names, f"model.experts.groups {e.groups} leaves a group one expert, and it is judged by two; lower it"
    elif e.top_groups > e.groups:
        yield (
            ("model.experts.top_groups", "model.experts.groups"),
            f"model.experts.top_groups {e.top_groups} is more than the groups there are, {e.groups}; lower it",
        )
    elif e.groups > 1 and e.top_k > e.top_groups * each:
        yield (
            ("model.experts.top_k", "model.experts.top_groups"),
            f"model.experts.top_k {e.top_k} is more than the {e.top_groups * each} experts of model.experts.top_groups "
            f"{e.top_groups}; lower it, or raise top_groups",
        )


def _routers(m: Model) -> Iterator[Broken]:
    if m.experts and m.experts.top_k == 1 and m.experts.normalize:
        # One weight, divided by itself: the loss would teach the router nothing.
        routed = FAMILIES[m.family].routed
        always = routed is not None and routed.always_normalized
        other = "" if always else "set model.experts.normalize to false, or "
        yield (
            ("model.experts.top_k", "model.experts.normalize"),
            "model.experts.top_k 1 with model.experts.normalize true gives every expert the weight 1, whatever the "
            f"router says, so the router would learn nothing from the loss; {other}set model.experts.top_k to 2",
        )


def _start(m: Model) -> Iterator[Broken]:
    if m.init != "auto" and m.weights is not None:
        yield (
            ("model.init", "model.weights"),
            f"model.init {m.init} is for a model that begins from nothing, and this one begins with model.weights; "
            f"remove one of them",
        )
    if m.init in FROM_THE_SHAPE and m.init_std != "auto":
        yield (
            ("model.init_std", "model.init"),
            f"model.init {m.init} takes its standard deviations from the shape, so model.init_std {m.init_std:g} would "
            f"do nothing; remove it, or choose another rule",
        )


def _rope(m: Model) -> Iterator[Broken]:
    scaling, kind = m.rope_scaling, ("model.rope_scaling.kind",)
    if scaling is None:
        return
    if scaling.mscale_all_dim is not None and (m.mla is None or scaling.kind != "yarn"):
        yield (
            ("model.rope_scaling.mscale_all_dim", "model.mla"),
            "model.rope_scaling.mscale_all_dim is for kind yarn with model.mla alone; remove it",
        )
    if scaling.kind == "dynamic" and _rotary_dim(m) <= 2:
        yield kind, f"model.rope_scaling of kind dynamic needs heads wider than {_head_dim(m)}; raise model.head_dim"
    if scaling.kind == "yarn" and m.rope_theta <= 1:
        yield kind, f"model.rope_scaling of kind yarn needs a model.rope_theta above 1, not {m.rope_theta:g}; raise it"
    if scaling.kind == "llama3" and scaling.original_max_seq_len is None:
        yield kind, "model.rope_scaling of kind llama3 needs original_max_seq_len; add it"
    if scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield (
            ("model.rope_scaling.high_freq_factor", "model.rope_scaling.low_freq_factor"),
            f"model.rope_scaling.high_freq_factor {scaling.high_freq_factor:g} is not above low_freq_factor "
            f"{scaling.low_freq_factor:g}; raise it",
        )


def _states(m: Model) -> Iterator[Broken]:
    if m.mamba is None:
        return
    if m.mamba.head_dim == "auto" and 2 * m.dim % m.mamba.heads:
        yield (
            ("model.mamba.heads", "model.dim"),
            f"model.mamba.heads {m.mamba.heads} does not divide twice model.dim {m.dim}; change it, or set "
            "model.mamba.head_dim",
        )
    if m.mamba.heads % m.mamba.groups:
        yield (
            ("model.mamba.groups", "model.mamba.heads"),
            f"model.mamba.groups {m.mamba.groups} does not divide model.mamba.heads {m.mamba.heads}; use one of "
            f"{_divisors(m.mamba.heads)}",
        )
    if beyond := [i for i in m.mamba.attention_layers if i >= m.layers]:
        yield (
            ("model.mamba.attention_layers", "model.layers"),
            f"model.mamba.attention_layers names layer {beyond[0]}, and model.layers {m.layers} are counted from 0; "
            "lower it",
        )


def _head_dim(m: Model) -> int:
    return m.dim // m.heads if m.head_dim == "auto" else m.head_dim


def _rotary_dim(m: Model) -> int:
    return m.mla.qk_rope_head_dim if m.mla else int(_head_dim(m) * FAMILIES[m.family].rotary)


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
