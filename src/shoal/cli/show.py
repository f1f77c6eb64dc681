"""Print a run file with every value resolved, and where each came from.

Values given after it are laid over it, as `shoal train` would: `shoal show run.yaml train.steps=10`. Sections of which
nothing was set are left out; `--all` prints them too. Of a run that has begun give its name: `shoal show demo
train.steps=700 train.schedule.prolong=decay` says what `shoal resume` with these values would do to its learning rate.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.data.index import index_in
from shoal.data.starts import said_of_run
from shoal.decide.length import measured, with_steps
from shoal.decide.load import load
from shoal.errors import DataError, SetupError, SpecError, UsageError
from shoal.journal.rundir import RunDir, workspace
from shoal.plain_file import read_object
from shoal.spec.describe import as_written
from shoal.spec.drivers import sections
from shoal.spec.layers import DEFAULT, leaves
from shoal.spec.names import dotted
from shoal.spec.presets import presets
from shoal.spec.reference import preset_shape
from shoal.spec.resolve import Loaded
from shoal.spec.run import NAME_PATTERN, Run
from shoal.spec.schema import schema_text
from shoal.spec.shape import Shape, shape_of
from shoal.spec.write import dump
from shoal.train.course import course
from shoal.train.prolong import prolonged
from shoal.values import BadValue, field, whole

if TYPE_CHECKING:
    from shoal.data.packs import Shares

TAKES_OVERRIDES = True
SHOAL = "shoal"  # where a value came from that nobody gave


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", metavar="RUN.yaml", help="the run file, or a run's name; NAME=VALUE after it override it"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--all", action="store_true", help="also the sections of which nothing was set")
    form.add_argument("--json", action="store_true", help="values, origins and parameter count as JSON")
    form.add_argument("--yaml", action="store_true", help="a run file with every value written out")
    form.add_argument("--schema", action="store_true", help="the JSON schema of a run file, for editors")
    form.add_argument("--presets", action="store_true", help="the named model shapes")


def run(args: argparse.Namespace) -> int:
    if args.schema:
        print(schema_text(), end="")
    elif args.presets:
        print(preset_table())
    elif args.file is None:
        raise UsageError("which run file? `shoal show RUN.yaml`; `shoal init pretrain` writes one to start from.")
    else:
        loaded = _loaded(args.file, args.overrides)
        text = as_json(loaded) if args.json else dump(loaded.run).rstrip() if args.yaml else as_lines(loaded, args.all)
        print(text)
    return 0


def _loaded(file: str, overrides: list[str]) -> Loaded:
    """A run file; of a run that has begun its own, and the values after it as on resuming it."""
    begun = RunDir.of(file, workspace()) if re.fullmatch(NAME_PATTERN, file) and not Path(file).exists() else None
    if begun is None or not begun.exists():
        return load(file, overrides)
    from shoal.guard.history import History  # it reads checkpoints: showing a file does not wait for that

    step, before, loaded = History.of(begun).step, load(begun.spec_file).run, load(begun.spec_file, overrides)
    if loaded.run.foreign_work is not None:
        return loaded
    longer = prolonged(before, with_steps(loaded.run, begun.workspace, step), step)
    known = {dotted(path): loaded.origins.get(dotted(path), SHOAL) for path, _ in _leaves(longer)}
    return Loaded(longer, known, loaded.path)


def as_lines(loaded: Loaded, everything: bool = False) -> str:
    """`key  value  origin`, aligned, then the length of the run, its learning rate and the size of the model."""
    rows = [(path, dotted(path), _short(value)) for path, value in _leaves(loaded.run) if _matters(loaded.run, path)]
    used = {path[:n] for path, key, _ in rows if loaded.origins[key] != DEFAULT.label for n in range(len(path))}
    shown = [(key, value, loaded.origins[key]) for path, key, value in rows if everything or path[:-1] in used]
    wide_key, wide_value = (max(len(row[i]) for row in shown) for i in (0, 1))
    lines = [f"{key:<{wide_key}}  {value:<{wide_value}}  {origin}" for key, value, origin in shown]
    left_out = dict.fromkeys(str(path[0]) for path, _, _ in rows if path[:1] not in used and path[:-1] not in used)
    if left_out and not everything:
        lines += ["", f"all defaults, and left out: {', '.join(left_out)} (`--all` shows them)"]
    if loaded.run.foreign_work is not None:
        return "\n".join(lines)
    below = [*_length(loaded.run), *_documents(loaded.run), *_packing(loaded.run), _size(loaded.run)]
    return "\n".join([*lines, "", *below])


def _length(run: Run) -> list[str]:
    """The steps, where they follow from something else, and the learning rate over them."""
    if run.train.steps != "auto":
        return course(run)
    try:
        length = measured(run, workspace())
    except (DataError, SetupError):
        return ["steps: not known until data.train is prepared, since they follow from train.epochs"]
    found = next(d for d in length.decisions if d.key == "train.steps")
    return [f"steps: {found.value:,} ({found.why})", *course(length.run)]


def _documents(run: Run) -> list[str]:
    """How the documents of its data start, where that data lies on this machine."""
    found = [index_in(Path(source.path)) for source in run.data.train]
    line = said_of_run([index.start_id for index in found if index is not None])
    return [] if line is None else [line]


def _packing(run: Run) -> list[str]:
    """How windows hold the documents of the data that is here, where that can be one way or another."""
    from shoal.data.packs import shares_in_words

    return [
        f"packing of {path} ({'best-fit' if best else 'chop'} here): {shares_in_words(found)}"
        for path, best, found in _packed(run)
    ]


def _packed(run: Run) -> Iterator[tuple[str, bool, Shares]]:
    from shoal.data.packs import by_best_fit, shares
    from shoal.data.shards import TokenShards

    for source in run.data.train:
        if "://" in source.path:
            continue  # showing a run file downloads nothing
        try:
            data = TokenShards.open(source.path)
            best = by_best_fit(run.data.packing, data)
            if best or data.has_mask:
                yield source.path, best, shares(data, run.data.seq_len)
        except (DataError, SetupError):
            continue  # not prepared yet; what is wrong with it, training says


def as_json(loaded: Loaded) -> str:
    shape = _shape(loaded.run) if loaded.run.foreign_work is None else None
    params = {"params": shape.params, "active_params": shape.active_params} if shape else {"params": None}
    spec = sections(loaded.run)
    packing = {path: {"used": "best-fit" if best else "chop", **found} for path, best, found in _packed(loaded.run)}
    shown = {"run": spec, "origins": loaded.origins, **params, "packing": packing}
    return json.dumps(shown, indent=2, ensure_ascii=False)


def preset_table() -> str:
    rows = [("preset", "parameters", "active", "family", "dim", "layers", "heads/kv", "what it is")]
    for preset in presets().values():
        shape = preset_shape(preset.model)
        active = count(shape.active_params) if shape.experts else ""
        heads = f"{shape.heads}/{shape.kv_heads}"
        numbers = (str(shape.dim), str(shape.layers), heads)
        rows.append((preset.name, count(preset.params), active, shape.family, *numbers, preset.about))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def count(n: int) -> str:
    """1635264 is 1.64M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return str(n)


def _leaves(run: Run) -> list[tuple[tuple[str | int, ...], Any]]:
    return list(leaves(sections(run)))


def _matters(run: Run, path: tuple[str | int, ...]) -> bool:
    """Of a model that is not Shoal's the shape says nothing, and what its config says is text of many lines."""
    return run.foreign is None or path[0] != "model" or path[1] in ("hf", "vocab_size", "max_seq_len")


def _short(value: Any) -> str:
    """As the run file spells it; plain words need no quotes there."""
    if isinstance(value, str):
        return value if value and value == value.strip() and value.isprintable() else as_written(value)
    return "-" if value is None or value in ([], {}) else as_written(value)


def _size(run: Run) -> str:
    if run.foreign is not None:
        return f"parameters: those of {run.foreign}, counted when it is trained"
    shape = _shape(run)
    if shape is None:
        return "parameters: not known until data.train is prepared, since model.vocab_size is auto"
    active = f", {shape.active_params:,} of them for each token" if shape.experts else ""
    return f"parameters: {shape.params:,} ({count(shape.params)}){active}; vocabulary {shape.vocab_size:,}"


def _shape(run: Run) -> Shape | None:
    """The shape, with the vocabulary of the prepared data when that is here."""
    try:
        return shape_of(run.model, _vocabulary(run))
    except SpecError:
        return None


def _vocabulary(run: Run) -> int | None:
    if not run.data.train:
        return None  # own code says it to those who train
    index = Path(run.data.train[0].path) / "index.json"
    try:
        return field(read_object(index), "vocab_size", lambda said: whole(said, 1 << 31, 1))
    except (OSError, BadValue):
        return None  # not prepared yet, or remote; showing a run file needs no data
