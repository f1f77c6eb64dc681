"""What must agree between the values of a run file: each rule names them and says in a sentence what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from shoal.spec.drivers import driver_of, refusals
from shoal.spec.families import FAMILIES
from shoal.spec.foreign_rules import foreign_rules
from shoal.spec.length import WAYS, decay_steps, steps_for_tokens, warmup_steps
from shoal.spec.mesh.refusal import refusal
from shoal.spec.mesh.rules import Broken, Work
from shoal.spec.model import Experts, Mla, Model
from shoal.spec.own_rules import own_rules
from shoal.spec.precision import problem
from shoal.spec.problems import is_missing, is_wrong
from shoal.spec.run import Run
from shoal.spec.script import CHECKPOINT, GIVEN
from shoal.spec.start_values import FROM_THE_SHAPE


def broken(run: Run) -> list[Broken]:
    """Every rule that `run` breaks: the dotted names it is about, and a sentence without its full stop."""
    rules = _RULES if run.script is None else _RULES_OF_SCRIPTS
    return [found for rule in rules for found in rule(run)]


def _model(run: Run) -> Iterator[Broken]:
    yield from computable(run.model)


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


def _routers(run: Run) -> Iterator[Broken]:
    m = run.model
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


def _start(run: Run) -> Iterator[Broken]:
    m = run.model
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


def _windows(run: Run) -> Iterator[Broken]:
    wanted, longest = run.data.seq_len, run.model.max_seq_len
    if wanted > longest:
        yield (
            ("data.seq_len", "model.max_seq_len"),
            f"data.seq_len {wanted} is longer than model.max_seq_len {longest}; lower it, or set model.max_seq_len to "
            f"{wanted} if the model is meant for that",
        )


def _data(run: Run) -> Iterator[Broken]:
    path = ("data", "train")
    if not run.data.train and run.own.data is None:
        said = is_wrong(path, []) if "train" in run.data.model_fields_set else is_missing(path)
        yield ("data.train",), said.removesuffix(".")


def _held_out(run: Run) -> Iterator[Broken]:
    trained = {source.path for source in run.data.train}
    for i, source in enumerate(run.data.eval):
        if source.path in trained:
            yield (
                (f"data.eval.{i}.path",),
                f"data.eval {source.path} is also in data.train, so its loss would say nothing; hold out other data",
            )
    if run.eval.every and not run.data.eval:
        yield ("eval.every", "data.eval"), f"eval.every {run.eval.every} needs held-out data; set data.eval"


def _precision(run: Run) -> Iterator[Broken]:
    if sentence := problem(run.train.precision, run.eval.precision):
        yield ("eval.precision", "train.precision"), sentence


def _best(run: Run) -> Iterator[Broken]:
    if run.checkpoint.keep_best and not run.data.eval:
        yield (
            ("checkpoint.keep_best", "data.eval"),
            f"checkpoint.keep_best {run.checkpoint.keep_best} goes by the loss on held-out data; set data.eval",
        )


def _somewhere(run: Run) -> Iterator[Broken]:
    if not run.checkpoint.local and not run.checkpoint.remote:
        yield (
            ("checkpoint.local", "checkpoint.remote"),
            "checkpoint.local false leaves no place for checkpoints; set checkpoint.remote",
        )


def _length(run: Run) -> Iterator[Broken]:
    said = [".".join(way) for way in WAYS if getattr(run.train, way[-1]) not in (None, "auto")]
    if not said:
        yield (
            ("train.steps",),
            "train.steps is missing; add `steps:` with a whole number of at least 1, or say train.epochs or "
            "train.tokens, from which the steps follow",
        )
    elif len(said) > 1:
        yield tuple(said), f"{' and '.join(said)} each say how long the run is; keep one of them"


def _schedule(run: Run) -> Iterator[Broken]:
    steps, schedule = known_steps(run), run.train.schedule
    if steps is None:
        return  # asked again once the data has been counted
    long = f"train.steps {steps}" if run.train.steps != "auto" else f"the {steps} steps of train.tokens"
    if schedule.past:
        ends = [0, *(piece.until for piece in schedule.past)]
        if any(a >= b for a, b in pairwise(ends)):
            yield (
                ("train.schedule.past",),
                f"train.schedule.past is until steps {', '.join(map(str, ends[1:]))}, which do not ascend; "
                "`shoal resume` writes them, so leave them as they were, or remove them",
            )
        if ends[-1] >= steps:
            return  # none of its own steps comes any more
        then = next((piece.then for piece in reversed(schedule.past) if piece.then not in (None, "jump")), None)
        if then in ("keep", "decay"):
            return  # no warm-up and no decay of its own comes any more
        if then == "rewarm" and schedule.past[-1].then == then:
            steps, long = steps - ends[-1], f"the {steps - ends[-1]} steps that are left"
    warmup = warmup_steps(schedule.warmup_steps, steps)
    if warmup >= steps:
        yield (
            ("train.schedule.warmup_steps", "train.steps"),
            f"train.schedule.warmup_steps {warmup} is not below {long}; lower it, or take a share of the run, such as "
            "5%",
        )
    elif schedule.name == "wsd":
        decay = decay_steps(schedule.decay_steps, steps)
        if warmup + decay > steps:
            yield (
                ("train.schedule.decay_steps", "train.schedule.warmup_steps", "train.steps"),
                f"train.schedule.warmup_steps {warmup} and the decay of {decay} steps exceed {long}; shorten one, or "
                "take shares of the run, such as 20%",
            )


def _z_loss(run: Run) -> Iterator[Broken]:
    if run.train.z_loss and run.train.precision == "fp8" and run.train.fp8_head:
        yield (
            ("train.z_loss", "train.fp8_head"),
            f"train.z_loss {run.train.z_loss:g} is not computed by an output layer in 8 bits; set "
            "train.fp8_head to false",
        )


def _fleet(run: Run) -> Iterator[Broken]:
    fleet, batch = run.fleet, run.train.batch
    # What only islands do, or do not do. Swarms and stages refuse all that is about islands, and more (`trainable`).
    for name, sentence in refusals(run, driver_of(run)):
        yield (name, "fleet.islands"), sentence
    if fleet.islands == 1:
        return
    if fleet.shards != "auto" and (batch % fleet.shards or fleet.shards < fleet.islands):
        yield (
            ("fleet.shards", "train.batch", "fleet.islands"),
            f"fleet.shards {fleet.shards} must divide train.batch {batch} and not be below fleet.islands "
            f"{fleet.islands}; change one",
        )
    if _copies_twice(run):
        yield (
            ("mesh.dp_replicate", "fleet.islands"),
            f"mesh.dp_replicate {run.mesh.dp_replicate} makes copies inside an island, and fleet.islands "
            f"{fleet.islands} are copies already; set it to 1",
        )


def _layout(run: Run) -> Iterator[Broken]:
    if _copies_twice(run):
        return  # it is told above, and the nearest mesh would be one with copies
    found = refusal(run.mesh, Work.of(run))
    if found:
        yield found


def _copies_twice(run: Run) -> bool:
    return run.fleet.islands > 1 and run.mesh.dp_replicate not in (1, "auto")


def _script(run: Run) -> Iterator[Broken]:
    assert run.script is not None
    for name, sentence in refusals(run, "script"):
        yield (name, "script"), sentence
    for name in sorted(run.script.env.keys() & GIVEN):
        yield (f"script.env.{name}",), f"script.env.{name} is what Shoal tells each process; leave it out"
    if CHECKPOINT in " ".join(run.script.args):
        yield (
            ("script.args", "script.resume"),
            f"script.args has {CHECKPOINT}, which is known at a restart alone; move it to script.resume",
        )


def _tracking(run: Run) -> Iterator[Broken]:
    address = run.track.mlflow
    if not isinstance(address, str):
        return
    scheme, found, rest = address.partition("://")
    if not found and address != "databricks":
        whole = f"http://{address or 'localhost:5000'}"
        yield ("track.mlflow",), f"track.mlflow '{address}' is no address; write it whole, such as {whole}"
    elif scheme.startswith("http") and "@" in rest.split("/")[0]:
        # A run file is copied, committed and shown; the environment is not.
        yield (
            ("track.mlflow",),
            "track.mlflow holds a user or password; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead",
        )


def known_steps(run: Run) -> int | None:
    """The steps of a run, where it needs no look at the data."""
    if run.train.steps != "auto":
        return run.train.steps
    tokens = run.train.tokens
    return None if tokens is None else steps_for_tokens(tokens, run.train.batch, run.data.seq_len)


def _head_dim(m: Model) -> int:
    return m.dim // m.heads if m.head_dim == "auto" else m.head_dim


def _rotary_dim(m: Model) -> int:
    return m.mla.qk_rope_head_dim if m.mla else int(_head_dim(m) * FAMILIES[m.family].rotary)


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


_RULES: tuple[Callable[[Run], Iterator[Broken]], ...] = (
    _model,
    _routers,
    _start,
    _windows,
    _data,
    _held_out,
    _precision,
    _best,
    _somewhere,
    _length,
    _schedule,
    _z_loss,
    _fleet,
    _layout,
    _tracking,
    own_rules,
    foreign_rules,
)
_RULES_OF_SCRIPTS: tuple[Callable[[Run], Iterator[Broken]], ...] = (_script, _tracking)
