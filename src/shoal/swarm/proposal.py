"""What one peer may propose to another: a closed set of values of the run file, each with its range.

Everything else that a run file can hold is the business of the machine that trains: devices, layout, trackers,
checkpoints, caches, code. A charter that names anything outside of this table is refused, whoever wrote it; so a name
that is added to the run file tomorrow is refused until somebody puts it here. No value in the table is free text: a
path is the place of one of the charter's inputs, a word is one of a list, a time has a range. Nothing can name code.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from shoal.spec.cut import MOST_PEERS, obstacle
from shoal.spec.drivers import Driver, obeyed, swarm_driver_of
from shoal.spec.duration import LONGEST_S, seconds
from shoal.spec.layers import leaves
from shoal.spec.names import Path, dotted, known_part, lookup
from shoal.spec.rules import broken
from shoal.spec.run import Run
from shoal.spec.shape import shape_of
from shoal.values import shown

Range = tuple[float, float]
WORD: Range = (0, 0)  # true, false, or one of a list of words
PLACE: Range = (0, -1)  # of an input
TIME: Range = (0.001, LONGEST_S)
MOST_PARAMS = 10**12  # every peer holds the whole model
MOST_BYTES = 10**15  # of the inputs; what is free on this machine's disk is a limit of its own
MOST_TOKENS = 10**17  # of the whole run
MOST_VALUES = 2000

# The same for all peers of a swarm: what makes it one run.
ALIKE: dict[str, Range] = {
    "seed": (0, 2**63 - 1),
    "model.weights": PLACE,
    "model.family": WORD,
    "model.vocab_size": (1, 1 << 24),
    "model.dim": (8, 1 << 17),
    "model.layers": (1, 4096),
    "model.heads": (1, 4096),
    "model.kv_heads": (1, 4096),
    "model.head_dim": (1, 1 << 14),
    "model.ffn_dim": (1, 1 << 20),
    "model.max_seq_len": (1, 1 << 24),
    "model.norm_eps": (1e-30, 1.0),
    "model.rope_theta": (1e-3, 1e15),
    "model.rope_scaling.kind": WORD,
    "model.rope_scaling.factor": (1, 1e6),
    "model.rope_scaling.original_max_seq_len": (1, 1 << 24),
    "model.rope_scaling.low_freq_factor": (1e-6, 1e6),
    "model.rope_scaling.high_freq_factor": (1e-6, 1e6),
    "model.rope_scaling.beta_fast": (1e-6, 1e6),
    "model.rope_scaling.beta_slow": (1e-6, 1e6),
    "model.rope_scaling.attention_factor": (1e-6, 1e6),
    "model.rope_scaling.mscale_all_dim": (1e-6, 1e6),
    "model.qk_norm": WORD,
    "model.qkv_bias": WORD,
    "model.out_bias": WORD,
    "model.mlp_bias": WORD,
    "model.tie_embeddings": WORD,
    "model.sliding_window": (1, 1 << 24),
    "model.full_attention_layers": (0, 4096),
    "model.full_attention_every": (2, 4096),
    "model.sliding_rope_theta": (1e-3, 1e15),
    "model.query_pre_attn_scalar": (1, 1 << 20),
    "model.init": WORD,
    "model.init_std": (1e-12, 1e3),
    "model.experts.count": (2, 1 << 14),
    "model.experts.top_k": (1, 1 << 14),
    "model.experts.ffn_dim": (1, 1 << 20),
    "model.experts.shared": (0, 1 << 10),
    "model.experts.dense_layers": (0, 4096),
    "model.experts.score": WORD,
    "model.experts.normalize": WORD,
    "model.experts.groups": (1, 1 << 14),
    "model.experts.top_groups": (1, 1 << 14),
    "model.experts.routed_scale": (1e-6, 1e6),
    "model.experts.balance_rate": (0, 10),
    "model.experts.balance_loss": (0, 10),
    "model.experts.z_loss": (0, 10),
    "model.mamba.attention_layers": (0, 4096),
    "model.mamba.heads": (1, 1 << 14),
    "model.mamba.head_dim": (1, 1 << 14),
    "model.mamba.state_dim": (1, 1 << 14),
    "model.mamba.groups": (1, 1 << 14),
    "model.mamba.conv_width": (1, 1 << 10),
    "model.mamba.conv_bias": WORD,
    "model.mamba.proj_bias": WORD,
    "model.mla.q_lora_rank": (1, 1 << 17),
    "model.mla.kv_lora_rank": (1, 1 << 17),
    "model.mla.qk_nope_head_dim": (1, 1 << 14),
    "model.mla.qk_rope_head_dim": (2, 1 << 14),
    "model.mla.v_head_dim": (1, 1 << 14),
    "model.mla.rope_interleave": WORD,
    "data.train.*.path": PLACE,
    "data.train.*.weight": (1e-12, 1e12),
    "data.eval.*.path": PLACE,
    "data.eval.*.weight": (1e-12, 1e12),
    "data.seq_len": (1, 1 << 24),
    "data.mask_documents": WORD,
    "data.packing": WORD,
    "train.steps": (1, 10**9),
    "train.batch": (1, 1 << 24),
    "train.clip": (1e-12, 1e12),
    "train.z_loss": (0, 10),
    "train.optimizer.name": WORD,
    "train.optimizer.lr": (1e-12, 1e3),
    "train.optimizer.betas": (0, 1),
    "train.optimizer.eps": (1e-30, 1.0),
    "train.optimizer.weight_decay": (0, 1e3),
    "train.optimizer.decay_embeddings": WORD,
    "train.optimizer.moments": WORD,
    "train.optimizer.muon_lr": (1e-12, 1e3),
    "train.optimizer.muon_momentum": (0, 1),
    "train.optimizer.muon_weight_decay": (0, 1e3),
    "train.schedule.name": WORD,
    "train.schedule.warmup_steps": (0, 10**9),
    "train.schedule.decay_steps": (1, 10**9),
    "train.schedule.min_ratio": (0, 1),
    "swarm.peers": (1, 2000),
    "swarm.batch": (1, 1 << 24),
    "swarm.round": TIME,
    "swarm.deadline": TIME,
    "swarm.quorum": (1e-6, 1),
    "swarm.overlap": WORD,
    "swarm.fragments": (1, 10**6),
    "swarm.codec": WORD,
    "swarm.chunk": (1, 1 << 24),
    "swarm.keep": (1, 1 << 24),
    "swarm.feedback": (0, 1),
    "swarm.outer_lr": (1e-12, 1e3),
    "swarm.outer_momentum": (0, 1),
    "swarm.robust": WORD,
    "swarm.partition": WORD,
    "swarm.silent": TIME,
    "swarm.snapshot_every": (1, 10**6),
}
# How each peer computes and looks at the same run. The charter says what the organiser takes; a peer may say otherwise.
ADVISED: dict[str, Range] = {
    "train.precision": WORD,
    "train.fp8_head": WORD,
    "train.fp8_scaling": WORD,
    "train.compile": WORD,
    "train.kernels": WORD,
    "eval.every": (0, 10**9),
    "eval.windows": (1, 10**9),
    "eval.precision": WORD,
}
# Of a model that is cut over peers, besides: its steps are those of one process, so nothing of them is a peer's own.
STAGES: dict[str, Range] = {
    "data.skip": (0, 10**9),
    "mesh.micro_batch": (1, 1 << 24),
    "checkpoint.every": (0, 10**9),
    "swarm.peers": (2, MOST_PEERS),
    "swarm.stages.count": (2, MOST_PEERS),
    "swarm.stages.activations": WORD,
    "swarm.stages.rank": (0, 1 << 17),
    "swarm.stages.gradients": WORD,
    "swarm.stages.in_flight": (0, 1 << 24),
    "swarm.stages.save_every": (1, 10**9),
}
_SETTLED = ("name", "model.preset", "train.epochs", "train.tokens")  # a charter states what follows from them


@dataclass(frozen=True)
class Table:
    """What a charter holds, by how its swarm trains."""

    driver: Driver
    alike: Mapping[str, Range]
    advised: Mapping[str, Range]

    @cached_property
    def proposed(self) -> dict[str, Range]:
        return {**self.alike, **self.advised}

    @cached_property
    def own(self) -> tuple[str, ...]:
        """What a peer chooses for itself: all that has an effect there and makes no other run. A charter states the
        whole shape."""
        return tuple(name for name in obeyed(self.driver) if name not in self.alike and name not in _SETTLED)

    @cached_property
    def sections(self) -> frozenset[str]:
        return frozenset(name[:i] for name in self.proposed for i, letter in enumerate(name) if letter == ".")


WHOLE = Table("swarm", ALIKE, ADVISED)
CUT = Table("cut", {n: range for n, range in (ALIKE | ADVISED).items() if n in obeyed("cut")} | STAGES, {})
PLACES = {name for name, range in ALIKE.items() if range is PLACE}


# What a charter of before there was a choice means.
LATER: dict[Path, Any] = {
    ("data", "packing"): "chop",
    ("model", "full_attention_every"): None,
    ("model", "sliding_rope_theta"): None,
    ("model", "query_pre_attn_scalar"): None,
    ("model", "experts", "groups"): 1,
    ("model", "experts", "top_groups"): 1,
    ("model", "experts", "routed_scale"): 1.0,
    ("model", "rope_scaling", "mscale_all_dim"): None,
}


def table_of(run: Run) -> Table:
    return CUT if swarm_driver_of(run) == "cut" else WHOLE


def _table_of_values(values: dict[str, Any]) -> Table:
    """A charter says that the model is cut by having the section; what is in it is not looked at here."""
    swarm = values.get("swarm")
    return CUT if isinstance(swarm, dict) and "stages" in swarm else WHOLE


class Unfit(Exception):
    """A value that may not be proposed; the sentence names it, without its full stop."""


def values_of(run: Run) -> dict[str, Any]:
    """What of a run is proposed to others. The writer sends this and nothing else."""
    table = table_of(run).proposed
    left_out = {path: meant for path, meant in LATER.items() if path[0] == "model"}  # so that older peers read it
    leaves = ((path, value) for path, value in _all_leaves(run) if path not in left_out or value != left_out[path])
    return _nested((path, value) for path, value in leaves if key(path) in table)


def run_of(name: str, values: Any, at: Mapping[str, str]) -> Run:
    """The run that is proposed, with this machine's defaults for everything else; Unfit for what is not in the table,
    out of its range, incomplete, or too large as a whole. `at`: where each input is here, by its place."""
    if not isinstance(values, dict):
        raise Unfit("its values are no section")
    table = _table_of_values(values)
    given = _checked(values, at, table)
    for path, meant in LATER.items():
        if any(given_path[: len(path) - 1] == path[:-1] for given_path in given):  # of a section that is there
            given.setdefault(path, meant)
    here = _nested((path, at[value] if key(path) in PLACES and value else value) for path, value in given.items())
    try:
        run = Run.model_validate({"name": name, **here})
    except ValidationError as e:
        wrong = tuple(e.errors(include_url=False, include_context=False, include_input=False)[0]["loc"])
        raise Unfit(f"{dotted(wrong) or 'it'} is not what it should be") from None
    understood = {path: value for path, value in _all_leaves(run) if key(path) in table.proposed}
    for path, value in understood.items():
        if key(path) not in PLACES and (path not in given or given[path] != value):
            was = (
                "is not there" if path not in given else f"is {str(given[path])[:40]!r}, which is not how it is written"
            )
            raise Unfit(f"{dotted(path)} {was}")
    if run.train.steps == "auto":
        raise Unfit("train.steps is not a number")
    if problems := broken(run):
        raise Unfit(problems[0][1])
    if table is CUT:
        _cuttable(run)
    _bounded(run)
    return run


def own_names(run: Run) -> list[str]:
    """Sections and names that a peer sets for itself."""
    table = table_of(run)
    sections = dict.fromkeys(n.partition(".")[0] for n in table.own)
    whole = [s for s in sections if not any(k.startswith(f"{s}.") for k in table.proposed)]
    return [*whole, *(n for n in table.own if n.partition(".")[0] not in whole)]


def not_own(run: Run, proposed: Run) -> str | None:
    """The first value that this run has otherwise than proposed, and that a peer cannot choose for itself."""
    mine, theirs = dict(_all_leaves(run)), dict(_all_leaves(proposed))
    changed = (path for path in (*mine, *theirs) if mine.get(path) != theirs.get(path))
    own = table_of(proposed).own
    return next((dotted(path) for path in changed if key(path) not in own), None)


def bounded_with(run: Run, vocabulary: int) -> None:
    """Once the data is here, which says how many words it has: Unfit for a model that is too large."""
    _bounded(run, vocabulary)


def key(path: Path) -> str:
    return ".".join("*" if isinstance(part, int) else part for part in path)


def _checked(values: Any, places: Container[str], table: Table) -> dict[Path, Any]:
    for count, (path, value) in enumerate(_nodes(values, table)):
        name = key(path)
        if count > MOST_VALUES:
            raise Unfit(f"it has more than {MOST_VALUES} values")
        if name in table.proposed:
            _in_range(name, value, table.proposed[name], places)
        elif name not in table.sections or not isinstance(value, dict | list) or not value:
            if lookup(path) is None:
                raise Unfit(f"it sets {name[:100]!r}, which no charter can hold")
            first = next((known_part(inner) for inner, _ in leaves(value, path)), path)
            raise Unfit(f"it sets {key(first)!r}, which is each peer's own and no charter's business")
    return dict(leaves(values))


def _nodes(value: Any, table: Table, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every section, item and value, from above."""
    if path:
        yield path, value
    if key(path) in table.proposed:
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, inner in items:
        yield from _nodes(inner, table, (*path, part))


def _in_range(name: str, value: Any, range: Range, places: Container[str]) -> None:
    if value is None or (value == "auto" and range is not PLACE):
        return  # its type says whether it may be
    if range is PLACE:
        if not isinstance(value, str) or value not in places:
            raise Unfit(f"{name} is {str(value)[:80]!r}, which is none of its inputs: no charter names a path")
        return
    if range is WORD:
        if not isinstance(value, bool) and not (isinstance(value, str) and len(value) < 40):
            raise Unfit(f"{name} is {str(value)[:40]!r}, where a word is due")
        return
    if range is TIME:
        try:
            value = seconds(value) if isinstance(value, str) and len(value) < 40 else float("nan")
        except ValueError:
            value = float("nan")
    least, most = range
    for number in value if isinstance(value, list) else [value]:
        # Compared as they are: a whole number of 400 digits is no float.
        if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number <= most:
            raise Unfit(f"{name} is {shown(value)}, and must be from {least:g} to {most:g}")


def _cuttable(run: Run) -> None:
    peers, stages = run.swarm.peers, run.swarm.stages.count
    if wrong := obstacle(run):
        raise Unfit(wrong)
    if peers < stages:
        raise Unfit(f"swarm.peers is {peers}, and a model cut into {stages} stages needs a peer for each: raise it")


def _bounded(run: Run, vocabulary: int = 1) -> None:
    shape = shape_of(run.model, vocabulary)
    if shape.params > MOST_PARAMS:
        raise Unfit(f"its model has {shape.params:.3g} parameters, and no peer takes more than {MOST_PARAMS:.0e}")
    if (tokens := run.steps * run.train.batch * run.data.seq_len) > MOST_TOKENS:
        raise Unfit(f"its run has {tokens:.3g} tokens, and no peer takes more than {MOST_TOKENS:.0e}")


def _all_leaves(run: Run) -> Iterator[tuple[Path, Any]]:
    return leaves(run.model_dump(mode="json"))


def _nested(pairs: Iterable[tuple[Path, Any]]) -> dict[str, Any]:
    """Leaves as sections again; items of a list come in their order."""
    top: dict[str, Any] = {}
    for path, value in pairs:
        at: Any = top
        for part, then in pairwise(path):
            empty: Any = [] if isinstance(then, int) else {}
            if isinstance(at, list):
                if len(at) == part:
                    at.append(empty)
                at = at[int(part)]
            else:
                at = at.setdefault(part, empty)
        at[path[-1]] = value
    return top
