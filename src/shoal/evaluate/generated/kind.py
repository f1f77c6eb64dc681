"""What a kind of made task is: how one item comes about, and the keys of lm-eval's task file that ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.evaluate.generated.dice import Dice

Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    version: int
    """Another one makes other items: numbers of two versions do not compare."""
    about: str
    item: Callable[[Dice], dict[str, Any]]
    """With `text`, and `target` (generation) or `choices` and `answer`."""
    keys: Keys
    """All but the task's name, its data and its version."""


def written(max_tokens: int, pattern: str, *, ignoring: tuple[str, ...] = (), stops: tuple[str, ...] = ("\n",)) -> Keys:
    """The model writes an answer. What the pattern finds in it first is compared with the target."""
    exact = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    return {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{target}}",
        "target_delimiter": " ",
        "fewshot_delimiter": "\n\n",
        "generation_kwargs": {"until": list(stops), "do_sample": False, "max_gen_toks": max_tokens},
        "filter_list": [
            {
                "name": "first",
                "filter": [{"function": "regex", "regex_pattern": pattern}, {"function": "take_first"}],
            }
        ],
        "metric_list": [{**exact, **({"regexes_to_ignore": list(ignoring)} if ignoring else {})}],
    }


def chosen(delimiter: str = "\n") -> Keys:
    """The model finds one of the choices likelier than the others."""
    return {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": " ",
        "fewshot_delimiter": delimiter,
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
        ],
    }


def with_examples(keys: Keys, count: int) -> Keys:
    """The first so many of a file of their own stand before each question: the same for all."""
    return {**keys, "fewshot_split": "train", "num_fewshot": count, "fewshot_config": {"sampler": "first_n"}}
