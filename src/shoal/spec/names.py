"""Every name a run file may hold, read off the typed sections, and the nearest right one for a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, get_args, get_origin

from pydantic.fields import FieldInfo

from shoal.spec.base import Folder, Strict
from shoal.spec.run import Run

Path = tuple[str | int, ...]

# What other trainers call our names: the first thing a newcomer types. Keys of the run file never clash with these.
_ELSEWHERE = {
    "learning_rate": "train.optimizer.lr",
    "batch_size": "train.batch",
    "global_batch_size": "train.batch",
    "micro_batch_size": "mesh.micro_batch",
    "gradient_accumulation_steps": "mesh.micro_batch",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "max_grad_norm": "train.clip",
    "grad_clip": "train.clip",
    "sequence_length": "data.seq_len",
    "context_length": "data.seq_len",
    "hidden_size": "model.dim",
    "d_model": "model.dim",
    "n_layers": "model.layers",
    "num_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "n_heads": "model.heads",
    "num_attention_heads": "model.heads",
    "intermediate_size": "model.ffn_dim",
    "initializer_range": "model.init_std",
    "init_method_std": "model.init_std",
    "initializer": "model.init",
    "save_steps": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "checkpoint_interval": "checkpoint.every",
    "ckpt_every": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "keep_latest_k": "checkpoint.keep",
    "max_to_keep": "checkpoint.keep",
    "save_top_k": "checkpoint.keep_best",
    "async_save": "checkpoint.background",
    "async_mode": "checkpoint.background",
    "eval_steps": "eval.every",
    "project": "track.experiment",
    "dp": "mesh.dp_shard, or mesh.dp_replicate for whole copies",
    "fsdp": "mesh.dp_shard",
    "ddp": "mesh.dp_replicate",
    "data_parallel_shard_degree": "mesh.dp_shard",
    "data_parallel_replicate_degree": "mesh.dp_replicate",
    "tensor_parallel": "mesh.tp",
    "tensor_parallel_size": "mesh.tp",
    "tensor_parallel_degree": "mesh.tp",
    "tensor_model_parallel_size": "mesh.tp",
    "pipeline_parallel": "mesh.pp",
    "pipeline_parallel_size": "mesh.pp",
    "pipeline_parallel_degree": "mesh.pp",
    "pipeline_model_parallel_size": "mesh.pp",
    "context_parallel": "mesh.cp",
    "context_parallel_size": "mesh.cp",
    "context_parallel_degree": "mesh.cp",
    "expert_parallel": "mesh.ep",
    "expert_parallel_size": "mesh.ep",
    "expert_parallel_degree": "mesh.ep",
    "expert_model_parallel_size": "mesh.ep",
    "activation_checkpoint": "mesh.recompute",
    "activation_checkpointing": "mesh.recompute",
    "gradient_checkpointing": "mesh.recompute",
    "num_experts": "model.experts.count",
    "nproc_per_node": "resources.processes",
}


@dataclass(frozen=True)
class Name:
    """One name: a value, a section, or a list of sections."""

    path: Path  # an item of a list is "*"
    field: FieldInfo
    section: type[Strict] | None  # the section it opens, or the kind of its items
    is_list: bool
    optional: bool

    @property
    def dotted(self) -> str:
        return dotted(self.path)

    @property
    def is_text(self) -> bool:
        """True when only text is right, so that a bare `2026` can be meant as text alone."""
        return set(_kinds(self.field.annotation)) - {type(None)} == {str}

    @property
    def is_path(self) -> bool:
        return any(isinstance(mark, Folder) for mark in marks(self.field))


def dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def lookup(path: Path) -> Name | None:
    return _all().get(tuple("*" if isinstance(part, int) else part for part in path))


def names() -> list[Name]:
    """All of them, in the order of the sections."""
    return list(_all().values())


def within(path: Path) -> list[str]:
    """The names that may stand in the section (or list item) at `path`; `()` is the file itself."""
    section = Run if path == () else getattr(lookup(path), "section", None)
    return list(section.model_fields) if section else []


def known_part(path: Path) -> Path:
    """The longest leading part of `path` that is a name; pydantic appends the kinds it tried."""
    for length in range(len(path), 0, -1):
        if lookup(path[:length]):
            return path[:length]
    return ()


def hint(path: Path) -> str:
    """What to do about the unknown name at `path`: where it belongs, or what it is most like."""
    *parent, key = path
    wrong = str(key)
    if lookup(tuple(wrong.split("."))) and "." in wrong:
        section, _, last = wrong.rpartition(".")
        return f"write `{last}:` inside the section `{section}:`"
    elsewhere = [n.dotted for n in names() if n.path[-1] == wrong]
    if wrong in _ELSEWHERE:
        return f"Shoal calls it {_ELSEWHERE[wrong]}"
    near = get_close_matches(wrong, within(tuple(parent)), n=1)
    if elsewhere and (not near or len(elsewhere) == 1):
        if len(elsewhere) == 1:
            section = elsewhere[0].rpartition(".")[0]
            return f"{wrong} belongs under {section}" if section else f"{wrong} belongs at the top of the file"
        return "did you mean " + " or ".join(elsewhere[:4]) + "?"
    if near:
        return f"did you mean {dotted((*parent, near[0]))}?"
    far = get_close_matches(wrong, {str(n.path[-1]): n for n in names()}, n=1)
    if far:
        return f"did you mean {next(n.dotted for n in names() if n.path[-1] == far[0])}?"
    return f"the names there are {', '.join(within(tuple(parent)))}"


def marks(field: FieldInfo) -> Iterator[Any]:
    """The marks on a field, also those on a part of its type (`LocalPath | None`)."""
    yield from field.metadata
    yield from _marks_within(field.annotation)


def _marks_within(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    for part in get_args(annotation):
        yield from _marks_within(part)


def _kinds(annotation: Any) -> Iterator[Any]:
    """The plain types that an annotation lets through: `Annotated[str, …] | None` gives str and NoneType."""
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) is None or get_origin(annotation) is tuple:
        yield annotation
    else:
        for part in get_args(annotation):
            yield from _kinds(part)


@cache
def _all() -> dict[Path, Name]:
    return {name.path: name for name in _walk(Run, ())}


def _walk(section: type[Strict], path: Path) -> Iterator[Name]:
    for key, field in section.model_fields.items():
        kinds = list(_kinds(field.annotation))
        lists = [k for k in kinds if get_origin(k) is tuple]
        items = [k for k in get_args(lists[0]) if isinstance(k, type) and issubclass(k, Strict)] if lists else []
        inner = items or [k for k in kinds if isinstance(k, type) and issubclass(k, Strict)]
        name = Name(
            path=(*path, key),
            field=field,
            section=inner[0] if inner else None,
            is_list=bool(items),
            optional=type(None) in kinds,
        )
        yield name
        if items:
            # The item itself is a name too: errors about one item are about that place.
            yield Name(path=(*name.path, "*"), field=field, section=inner[0], is_list=False, optional=False)
        if inner:
            yield from _walk(inner[0], (*name.path, "*") if items else name.path)
