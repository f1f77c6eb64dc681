"""Reads lm-eval's task files: the part of its keys that says what is asked of which local items.

What lm-eval knows and this does not is refused by name: a key is obeyed or refused, never passed over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import SpecError
from shoal.evaluate.filters import FILTERS
from shoal.evaluate.items import Row, read_items
from shoal.evaluate.metrics import MEASURES, OF_KIND
from shoal.evaluate.task import (
    AS_IT_IS,
    CHOICE,
    GENERATE,
    KINDS,
    ROLLING,
    FewShot,
    Filter,
    Metric,
    Task,
    Template,
    Until,
)
from shoal.near import closest
from shoal.spec.yaml_text import parse, read_text
from shoal.values import BadValue, each, field, flag, inside, one_of, real, shown, table, text, whole

# Keys that say nothing about what is asked or counted.
SILENT = ("task_alias", "tag", "should_decontaminate", "doc_to_decontamination_query", "unsafe_code")
KNOWN = (
    *("task", "dataset_path", "dataset_name", "dataset_kwargs", "training_split", "validation_split", "test_split"),
    *("fewshot_split", "fewshot_config", "num_fewshot", "doc_to_text", "doc_to_target", "doc_to_choice", "description"),
    *("target_delimiter", "fewshot_delimiter", "output_type", "generation_kwargs", "repeats", "filter_list"),
    *("metric_list", "metadata", *SILENT),
)
REFUSED = {
    "include": "write the keys of the other file into this one",
    "group": "name its tasks with --tasks, each by its file",
    "process_docs": "it is a program; write the items as they should be into the file",
    "process_results": "it is a program; choose metrics of metric_list",
    "custom_dataset": "it is a program; write its items to a JSONL file",
    "use_prompt": "write the prompt into doc_to_text",
    "gen_prefix": "write it at the end of doc_to_text",
    "doc_to_image": "Shoal's models read text",
    "doc_to_audio": "Shoal's models read text",
}
MOST_TEXT = 1 << 20
MOST_FEW_SHOT = 1000
Splits = Mapping[str, Sequence[Row]]


def load_task(file: Path, few_shot: int | None = None) -> Task:
    """`few_shot`: another number of examples than its own."""
    words = read_text(file)
    if "!function" in words:
        raise SpecError(
            f"{file} calls a program (!function), which Shoal does not run; write what it makes into the items."
        )
    said = parse(words, str(file)).values
    config = _keys(said, str(file))
    return task_of(config, _splits(config, file), str(file), few_shot)


def task_of(config: Mapping[str, Any], splits: Splits, where: str, few_shot: int | None = None) -> Task:
    """Out of a task file's keys and items that are there already, by the names of their splits."""
    config = _keys(config, where)
    try:
        return _task(config, splits, where, few_shot)
    except BadValue as e:
        raise SpecError(f"{where}: {e}; see docs/guide/evaluate.md for what a task file may say.") from None


def _keys(said: object, where: str) -> Mapping[str, Any]:
    if not isinstance(said, Mapping):
        raise SpecError(f"{where} is no task file: it should have keys such as task, dataset_path and doc_to_text.")
    for key in said:
        if key in REFUSED:
            raise SpecError(f"{where}: {key} is not read by Shoal; {REFUSED[key]}.")
        if key not in KNOWN:
            near = closest(str(key), KNOWN)
            hint = f"did you mean {near}?" if near else f"known are {', '.join(k for k in KNOWN if k not in SILENT)}."
            raise SpecError(f"{where}: {shown(key)} is not known; {hint}")
    return said


def _task(config: Mapping[str, Any], splits: Splits, where: str, few_shot: int | None) -> Task:
    kind = field(config, "output_type", lambda said: one_of(said, KINDS), GENERATE)
    if field(config, "repeats", lambda said: whole(said, 64, 1), 1) != 1:
        raise BadValue("each question is asked once here; leave it out", "repeats")
    tested = next((config[key] for key in ("test_split", "validation_split") if config.get(key) is not None), None)
    if tested is None:
        raise BadValue("it is missing: which of the splits is measured", "test_split")
    items = _split(splits, tested, "test_split")
    shot, examples, own = _few_shot(config, splits, items, few_shot)
    choices = field(config, "doc_to_choice", _choices, None)
    if kind == CHOICE and choices is None:
        raise BadValue("it is missing, and multiple_choice needs it", "doc_to_choice")
    if kind != GENERATE and config.get("filter_list") is not None:
        raise BadValue("filters are for answers of generate_until; leave it out", "filter_list")
    metadata = table(config.get("metadata") or {}, 64)
    name = field(config, "task", lambda said: _plain(said, 200))
    return Task(
        name,
        kind,
        items,
        examples,
        own,
        "" if kind == ROLLING else field(config, "doc_to_text", _template),
        field(config, "doc_to_target", _target),
        choices,
        _metrics(config, kind),
        _filters(config),
        shot,
        _until(config, kind),
        field(config, "description", _text, ""),
        field(config, "fewshot_delimiter", _text, "\n\n"),
        field(config, "target_delimiter", _text, " "),
        str(metadata.get("version", "0"))[:40],
        field(metadata, "cluster", lambda said: _plain(said, 200), None),
        _digest(config, items, examples, shot),
    )


def _digest(config: Mapping[str, Any], items: Sequence[Row], examples: Sequence[Row], shot: FewShot) -> str:
    """Not of where the items lie, but of what they are."""
    kept = {key: value for key, value in config.items() if not key.startswith("dataset_")}
    said = json.dumps([kept, shot.count, items, examples], sort_keys=True, default=str)
    return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()


def _split(splits: Splits, name: object, key: str) -> Sequence[Row]:
    if not isinstance(name, str) or name not in splits:
        raise BadValue(
            f"{shown(name)} is none of the splits that data_files names ({', '.join(splits) or 'none'})", key
        )
    return splits[name]


def _few_shot(
    config: Mapping[str, Any], splits: Splits, items: Sequence[Row], asked: int | None
) -> tuple[FewShot, Sequence[Row], bool]:
    said = table(config.get("fewshot_config") or {}, 32)
    known = {
        "sampler": lambda said: one_of(said, ("default", "first_n")),
        "split": _text,
        "samples": each(lambda one: table(one, 1000), MOST_FEW_SHOT),
        "doc_to_text": _template,
        "doc_to_target": _target,
        "doc_to_choice": _choices,
        "fewshot_delimiter": _text,
        "target_delimiter": _text,
    }
    with inside("fewshot_config"):
        for key in said:
            if key not in known:
                raise BadValue(f"known are {', '.join(known)}", shown(key))
        told: dict[str, Any] = {key: field(said, key, read, None) for key, read in known.items()}
    count = field(config, "num_fewshot", lambda n: 0 if n is None else whole(n, MOST_FEW_SHOT), 0)
    shot = FewShot(
        count if asked is None else asked,
        told["sampler"] == "first_n",
        told["doc_to_text"],
        told["doc_to_target"],
        told["doc_to_choice"],
        told["fewshot_delimiter"],
        told["target_delimiter"],
    )
    split = told["split"] if told["split"] is not None else config.get("fewshot_split")
    own = split == config.get("test_split")  # as lm-eval has it, by the names
    if split is not None:
        return shot, _split(splits, split, "fewshot_split"), own
    if told["samples"] is not None:
        return shot, told["samples"], own
    for key in ("training_split", "validation_split"):
        if config.get(key) is not None:
            return shot, _split(splits, config[key], key), own
    return shot, items, own


def _metrics(config: Mapping[str, Any], kind: str) -> tuple[Metric, ...]:
    said = config.get("metric_list")
    if said is None:
        return tuple(Metric(name) for name in OF_KIND[kind])
    found = []
    for n, one in enumerate(each(lambda row: table(row, 16), 32)(said)):
        with inside(f"metric_list {n}"):
            name = field(one, "metric", lambda said: one_of(said, MEASURES))
            if kind not in MEASURES[name].kinds:
                raise BadValue(f"it is none of {kind}, which has {', '.join(OF_KIND[kind])}", name)
            if one.get("aggregation", MEASURES[name].aggregation) != MEASURES[name].aggregation:
                raise BadValue(f"of {name} it is {MEASURES[name].aggregation}", "aggregation")
            if one.get("hf_evaluate", False):
                raise BadValue("metrics of other packages are not run; leave it out", "hf_evaluate")
            options = {
                k: v for k, v in one.items() if k not in ("metric", "aggregation", "higher_is_better", "hf_evaluate")
            }
            for key, value in options.items():
                if key not in MEASURES[name].options:
                    raise BadValue(f"it is no option of {name}", shown(key))
                with inside(key):
                    _ = each(_text, 100)(value) if key == "regexes_to_ignore" else flag(value)
            found.append(Metric(name, options))
    if not found:
        raise BadValue("it is empty; leave it out for the usual ones", "metric_list")
    return tuple(found)


def _filters(config: Mapping[str, Any]) -> tuple[Filter, ...]:
    said = config.get("filter_list")
    if said is None:
        return (AS_IT_IS,)
    found = []
    for n, one in enumerate(each(lambda row: table(row, 4), 32)(said)):
        with inside(f"filter_list {n}"):
            steps = []
            for step in field(one, "filter", each(lambda row: table(row, 16), 32)):
                name = field(step, "function", lambda said: one_of(said, FILTERS))
                options = {key: value for key, value in step.items() if key != "function"}
                for key, value in options.items():
                    if key not in FILTERS[name]:
                        raise BadValue(f"it is no option of {name}", shown(key))
                    with inside(key):
                        FILTERS[name][key](value)
                steps.append((name, options))
            if [name for name, _ in steps].count("take_first") != 1 or steps[-1][0] != "take_first":
                raise BadValue("its last function must be take_first, and no other", "filter")
            found.append(Filter(field(one, "name", lambda said: _plain(said, 200)), tuple(steps)))
    if len({one.name for one in found}) != len(found) or not found:
        raise BadValue("it needs filters with names of their own", "filter_list")
    return tuple(found)


def _until(config: Mapping[str, Any], kind: str) -> Until:
    ends = field(config, "fewshot_delimiter", _text, "\n\n")
    said = config.get("generation_kwargs")
    if said is None or kind != GENERATE:
        return Until((ends,))
    with inside("generation_kwargs"):
        return until_of(said, ends)


def until_of(said: object, ends: str) -> Until:
    """lm-eval's generation_kwargs. `ends`: where an answer ends if they do not say."""
    aliases = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    told = table(said, 16)
    for key in told:
        if key not in ("until", "do_sample", "temperature", "top_k", "top_p", *aliases):
            raise BadValue("known are until, do_sample, temperature, top_k, top_p and max_gen_toks", shown(key))
    stops = told.get("until", [ends])
    most = next((field(told, key, lambda n: whole(n, 1 << 20, 1)) for key in aliases if key in told), 256)
    warm = field(told, "temperature", lambda said: real(said, 1e6, 0), 0.0)
    draws = field(told, "do_sample", flag, warm > 0)
    if draws and not warm:
        raise BadValue("do_sample is true, and the temperature 0: say one of them otherwise", "temperature")
    return Until(
        tuple(one for one in each(_text, 100)([stops] if isinstance(stops, str) else stops) if one),
        most,
        warm if draws else 0.0,
        field(told, "top_k", lambda n: whole(n, 1 << 30, 1), None),
        field(told, "top_p", lambda said: real(said, 1, 0), 1.0),
    )


def _splits(config: Mapping[str, Any], file: Path) -> dict[str, list[Row]]:
    """`dataset_path: json | parquet` with data_files; what is on a hub is not fetched."""
    kind = config.get("dataset_path")
    if kind not in ("json", "parquet"):
        raise SpecError(
            f"{file}: dataset_path is {shown(kind)}, and Shoal reads local files alone: save the items as JSON lines, "
            "and say dataset_path: json and dataset_kwargs: {data_files: {test: FILE}}."
        )
    if config.get("dataset_name") is not None:
        raise SpecError(f"{file}: dataset_name belongs to data sets of a hub; leave it out.")
    try:
        with inside("dataset_kwargs"):
            files = field(table(config.get("dataset_kwargs"), 8), "data_files", lambda said: said)
            named = files if isinstance(files, Mapping) else {"train": files}
            paths = {split: _paths(value, file) for split, value in table(dict(named), 32).items()}
    except BadValue as e:
        raise SpecError(f"{file}: {e}; write data_files: {{test: FILE}}.") from None
    said = config.get("fewshot_config")
    wanted = [config.get(key) for key in ("test_split", "validation_split", "training_split", "fewshot_split")]
    wanted += [said.get("split")] if isinstance(said, Mapping) else []
    return {split: read_items(each_of, kind) for split, each_of in paths.items() if split in wanted}


def _paths(said: object, file: Path) -> list[Path]:
    """As lm-eval has it, from the folder in which one is; what is not there is looked for beside the task file."""
    names = each(_text, 1000)([said] if isinstance(said, str) else said)
    found = []
    for name in names:
        if "://" in name or "\0" in name or not name:
            raise BadValue(f"{shown(name)} is no local file", "data_files")
        here = Path(name)
        found.append(here if here.is_absolute() or here.exists() else file.parent / here)
    return found


def _text(said: object) -> str:
    return text(said, MOST_TEXT)


def _plain(said: object, most: int) -> str:
    found = text(said, most)
    if not found or not found.isprintable():
        raise BadValue(f"{shown(found)} where a name belongs")
    return found


def _template(said: object) -> Template:
    return whole(said, 1 << 30) if isinstance(said, int) and not isinstance(said, bool) else _text(said)


def _target(said: object) -> Template | list[str]:
    return each(_text, 1000)(said) if isinstance(said, list) else _template(said)


def _choices(said: object) -> str | list[str]:
    if isinstance(said, Mapping):
        said = list(said.values())
    return [str(one) for one in each(_text, 1000)(said)] if isinstance(said, list) else _text(said)
