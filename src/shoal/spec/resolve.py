"""From a run file to a `Run`: read it, lay the command line over it and the preset or weights under it, check it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

from pydantic import ValidationError

from shoal.errors import SetupError, ShoalError, SpecError
from shoal.spec.before import of_then
from shoal.spec.engine_rules import closed_by_engine
from shoal.spec.layers import COMMAND_LINE, DEFAULT, Layer, Origin, layer, leaves, normal
from shoal.spec.model import Model
from shoal.spec.names import Path, dotted
from shoal.spec.overrides import apply
from shoal.spec.own_rules import closed_by_own
from shoal.spec.presets import preset
from shoal.spec.problems import sentences
from shoal.spec.rules import broken
from shoal.spec.run import Run
from shoal.spec.yaml_text import Document, dump_yaml, parse, read_text

# What a file of weights fixes: these cannot differ from its config.json, or the tensors would not fit.
_FIXED_BY_WEIGHTS = (
    "family", "vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim",
    "qk_norm", "qkv_bias", "out_bias", "mlp_bias", "tie_embeddings", "init_std",
    "experts.count", "experts.ffn_dim", "experts.shared", "experts.dense_layers",
    "mamba.attention_layers", "mamba.heads", "mamba.head_dim", "mamba.state_dim", "mamba.groups", "mamba.conv_width",
    "mamba.conv_bias", "mamba.proj_bias",
    "mla.q_lora_rank", "mla.kv_lora_rank", "mla.qk_nope_head_dim", "mla.qk_rope_head_dim", "mla.v_head_dim",
)  # fmt: skip


# Names that resolved files of earlier versions lack: each had what is its default now, but for `init`.
_LATER = (
    "init", "mamba", "hf", "hf_config", "full_attention_every", "sliding_rope_theta", "query_pre_attn_scalar", "mla",
)  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    """A run, and where each of its values came from (`run.yaml:12`, `command line`, `preset tiny`, `default` …)."""

    run: Run
    origins: dict[str, str]
    path: File


# The model that a checkpoint of Shoal's own describes; None where a place holds none. (`shoal.checkpoint` reads it, and
# stands above.)
OfCheckpoint = Callable[[str], dict[str, Any] | None]


def load(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), of_checkpoint: OfCheckpoint | None = None
) -> Loaded:
    """Read a run file; `overrides` are `a.b=value`. Everything wrong is said at once, one sentence a line (SpecError).

    Relative paths in the file start at its folder, those in overrides at the current folder. Whether they exist is not
    asked here, so that a run can be shown on another machine; `checks.local_inputs` asks. Where a person wrote the file
    its `model.weights` may name a checkpoint: `shoal.decide.load` can read that.
    """
    file = File(path)
    return _resolved(file, _document(file), overrides, of_checkpoint)


def of_text(text: str, path: str | os.PathLike[str], of_checkpoint: OfCheckpoint | None = None) -> Loaded:
    """As `load`, of what is not yet written there."""
    return _resolved(File(path), parse(text, str(path)), (), of_checkpoint)


def of_values(values: dict[str, Any], overrides: Sequence[str] = (), said_by: str = "the command line") -> Loaded:
    """As `load`, of a run that a command line describes; relative paths are from the current folder."""
    file = File(said_by)
    return _resolved(file, parse(dump_yaml(values), str(file)), overrides, None)


def _resolved(file: File, document: Document, overrides: Sequence[str], of_checkpoint: OfCheckpoint | None) -> Loaded:
    stated = apply(overrides, _file_layer(file, document), os.getcwd())
    problems: list[str] = []
    try:
        whole = stated.over(_base(stated, of_checkpoint)).over(_of_then(stated))
    except SpecError as e:
        whole, problems = stated, str(e).split("\n")

    def where(*paths: Path) -> str:
        return _where(paths, stated, document, file)

    try:
        run = closed_by_engine(closed_by_own(_with_folder(Run.model_validate(whole.values), file)))
        # Without its preset the shape is not the one meant, and the rules would complain about the wrong thing.
        problems += [] if problems else [f"{where(*map(_path, names))}: {text}." for names, text in broken(run)]
    except ValidationError as e:
        problems += sentences(e, whole.values, where, _without_data(whole.values))
    if problems:
        raise SpecError("\n".join(sorted(problems, key=lambda text: _order(text, file))))
    values = run.model_dump(mode="json")
    origins = {dotted(p): whole.origins.get(p, DEFAULT).label for p, _ in leaves(values)}
    return Loaded(run, origins, file)


def _with_folder(run: Run, file: File) -> Run:
    """Own code is looked for beside the run file, wherever the run file is copied to."""
    if not (run.own.objects or run.own.launcher) or run.own.folder is not None:
        return run
    folder = run.launch.code or os.path.dirname(os.path.abspath(file))
    return run.model_copy(update={"own": run.own.model_copy(update={"folder": folder})})


def _without_data(values: dict[str, Any]) -> list[Path]:
    """`data.train`, where it is missing; the rules, which say so of a file with right values, were not asked."""
    if values.get("script") is not None or values.get("batch") is not None:
        return []
    data, own = values.get("data"), values.get("own")
    own_data = own.get("data") if isinstance(own, dict) else None
    return [("data", "train")] if isinstance(data, dict) and "train" not in data and own_data is None else []


def _document(file: File) -> Document:
    document = parse(read_text(file), str(file))
    if document.values is None:
        raise SpecError(f"{file} is empty; `shoal init pretrain {file} --force` writes a run file to start from.")
    if not isinstance(document.values, dict):
        raise SpecError(f"{file}:{document.places[()]}: a run file is lines of `name: value`, not a list or one value.")
    return document


def _file_layer(file: File, document: Document) -> Layer:
    def origin(path: Path) -> Origin:
        place = _nearest(path, document)
        return Origin(f"{file.name}:{place.line}", f"{file}:{place}")

    folder = os.path.dirname(os.path.abspath(file))
    return layer(normal(document.values, (), document.spelt, folder), origin)


def _of_then(stated: Layer) -> Layer:
    return layer(of_then(stated.values), lambda path: Origin(f"before {dotted(path)}", dotted(path)))


def _base(stated: Layer, of_checkpoint: OfCheckpoint | None) -> Layer:
    """What lies under the stated values: the preset's shape or that of the weights.

    A file that states the whole shape needs neither; the resolved file in a run directory is one, and so it loads when
    the weights it once started from are gone or a later Shoal has another preset of that name.
    """
    model = stated.values.get("model")
    if not isinstance(model, dict):
        return Layer()
    if all(name in model for name in Model.model_fields if name not in _LATER):
        if "init" in model:
            return Layer()
        # A resolved file from before there were rules for the start values: it began by the only one there was.
        origin = Origin("before model.init", "model.init")
        return layer({"model": {"init": "auto" if model["weights"] else "normal"}}, lambda _: origin)
    if isinstance(model.get("hf"), str) and model["hf"]:
        return _of_any_model(File(model["hf"]), stated)
    name, weights = model.get("preset"), model.get("weights")
    if isinstance(name, str) and isinstance(weights, str):
        raise SpecError(
            f"{_said(stated, 'weights')}: model.weights and model.preset cannot both give the shape; remove one."
        )
    if isinstance(name, str):
        origin = Origin(f"preset {name}", f"preset {name}")
        return layer({"model": preset(name, _said(stated, "preset")).model}, lambda _: origin)
    if isinstance(weights, str) and weights:
        origin = Origin("weights manifest.json", weights)
        shape = _shape_of_checkpoint(weights, _said(stated, "weights"), of_checkpoint)
        if shape is None:
            origin = Origin("weights config.json", os.path.join(weights, "config.json"))
            shape = _shape_of_weights(File(weights), _said(stated, "weights"))
        _same_shape(model, shape, stated)
        return layer({"model": shape}, lambda _: origin)
    return Layer()


def _of_any_model(folder: File, stated: Layer) -> Layer:
    """What the config of a model that is not Shoal's says of it."""
    from shoal.spec.hf.any_model import fields_of

    where = _said(stated, "hf")
    try:
        fields = fields_of(folder)
    except SpecError as e:
        raise SpecError(f"{where}: {e}") from None
    except ShoalError as e:
        raise SetupError(f"{where}: {e}") from None
    origin = Origin("hf config.json", str(folder / "config.json"))
    return layer({"model": fields}, lambda _: origin)


def _shape_of_weights(folder: File, where: str) -> dict[str, Any]:
    from shoal.spec.hf.folder import CONFIG, model_of_folder

    if not (folder / CONFIG).exists():
        raise SetupError(
            f"{where}: model.weights needs {folder / CONFIG}, which is not there; give the folder of a Hugging Face "
            f"model (`hf download NAME --local-dir FOLDER` gets one), or a checkpoint."
        )
    try:
        return model_of_folder(folder).model_dump(exclude_unset=True)
    except SpecError as e:
        raise SpecError(f"{where}: {e}") from None
    except ShoalError as e:
        raise SetupError(f"{where}: {e}") from None


def _shape_of_checkpoint(weights: str, where: str, read: OfCheckpoint | None) -> dict[str, Any] | None:
    try:
        return read(weights) if read else None
    except ShoalError as e:
        raise SetupError(f"{where}: model.weights: {e}") from e


def _same_shape(model: dict[str, Any], shape: dict[str, Any], stated: Layer) -> None:
    problems = []
    for name in _FIXED_BY_WEIGHTS:
        said, found = _value(model, name), _value(shape, name)
        if said is not None and found is not None and said not in ("auto", found):
            problems.append(f"{_said(stated, name)}: model.{name} is {said}, but the weights have {found}; remove it.")
    if problems:
        raise SpecError("\n".join(problems))


def _value(section: Any, name: str) -> Any:
    for part in name.split("."):
        section = section.get(part) if isinstance(section, dict) else None
    return section


def _said(stated: Layer, name: str) -> str:
    origin = stated.origin(("model", *name.split(".")))
    return origin.where if origin else f"model.{name}"


def _where(paths: Sequence[Path], stated: Layer, document: Document, file: File) -> str:
    """The place to look at for a problem with these values: where a person stated one, the command line first."""
    origins = [stated.origins[path] for path in paths if path in stated.origins]
    if origins:
        return min(origins, key=lambda origin: origin.label != COMMAND_LINE).where
    for length in range(len(paths[0]), 0, -1):
        above = paths[0][:length]
        origin = stated.origins.get(above)
        if isinstance(above[-1], int) or above not in document.places:
            origin = stated.origin(above)  # in a list, or in a section from the command line
        if origin:
            return origin.where

        if above in document.places:
            return f"{file}:{document.places[above]}"
    return str(file)


def _order(problem: str, file: File) -> tuple[int, ...]:
    """Sorts problems as a person goes through them: down the file, then the file as a whole, then the command line."""
    place = re.match(rf"{re.escape(str(file))}:(\d+)(?::(\d+))?:", problem)
    if place:
        return 0, int(place[1]), int(place[2] or 0)
    return (1,) if problem.startswith(f"{file}:") else (2,)


def _nearest(path: Path, document: Document) -> Any:
    return next(document.places[path[:n]] for n in range(len(path), -1, -1) if path[:n] in document.places)


def _path(name: str) -> Path:
    return tuple(int(part) if part.isdecimal() else part for part in name.split("."))
