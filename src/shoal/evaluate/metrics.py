"""What an answer is worth: lm-eval's metrics, the value of each for one question and of all of them together.

A value is a number, of which the mean counts, or a pair of numbers, of which the ratio of the sums does (a
log-likelihood and the bytes it is of).
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from shoal.errors import DataError
from shoal.evaluate.filters import LIMITS
from shoal.evaluate.questions import Question
from shoal.evaluate.statistics import Interval, interval, interval_of_ratio
from shoal.evaluate.task import CHOICE, GENERATE, LOGLIKELIHOOD, ROLLING, Metric
from shoal.generate.limited import Refused, limited

Value: TypeAlias = float | tuple[float, float]
Scores: TypeAlias = Sequence[tuple[float, bool]]
"""Of each thing that was asked: its log-likelihood, and whether it is what the model would have said."""


@dataclass(frozen=True)
class Measure:
    kinds: tuple[str, ...]
    aggregation: str
    higher_is_better: bool = True
    unit: str = ""
    """Of the difference of two models, which is taken of logarithms where the figure is an exponential."""
    options: tuple[str, ...] = ()


_IGNORE = ("ignore_case", "ignore_punctuation", "ignore_numbers", "regexes_to_ignore")
MEASURES: Mapping[str, Measure] = {
    "acc": Measure((LOGLIKELIHOOD, CHOICE), "mean"),
    "acc_norm": Measure((CHOICE,), "mean"),
    "acc_bytes": Measure((CHOICE,), "mean"),
    "exact_match": Measure((CHOICE, GENERATE), "mean", options=_IGNORE),
    "perplexity": Measure((LOGLIKELIHOOD,), "perplexity", False, "nats an answer"),
    "word_perplexity": Measure((ROLLING,), "weighted_perplexity", False, "nats a word"),
    "byte_perplexity": Measure((ROLLING,), "weighted_perplexity", False, "nats a byte"),
    "bits_per_byte": Measure((ROLLING,), "bits_per_byte", False, "bits a byte"),
}
OF_KIND: Mapping[str, tuple[str, ...]] = {
    LOGLIKELIHOOD: ("perplexity", "acc"),
    ROLLING: ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    CHOICE: ("acc", "acc_norm"),
    GENERATE: ("exact_match",),
}


def of_scores(metric: str, question: Question, scores: Scores) -> Value:
    """Of a question whose answers were given and only judged."""
    found = [score for score, _ in scores]
    match metric:
        case "perplexity":
            return found[0]
        case "word_perplexity":
            return found[0], float(question.lengths[0][0])
        case "byte_perplexity" | "bits_per_byte":
            return found[0], float(question.lengths[0][1])
        case "acc" if not question.lengths:
            return float(scores[0][1])
        case "acc":
            return _right(question, np.array(found))
        case "acc_norm":
            return _right(question, np.array(found) / np.array([chars for chars, _ in question.lengths]))
        case "acc_bytes":
            return _right(question, np.array(found) / np.array([size for _, size in question.lengths]))
    return float(any(scores[one][1] for one in question.right if one != -100))  # exact_match


def of_answers(metric: Metric, questions: Sequence[Question], answers: Sequence[str]) -> list[float]:
    """exact_match of texts that were written. Patterns are a stranger's: they run in a child with limits."""
    pairs = list(zip(questions, answers, strict=True))

    def matches() -> bytes:
        return bytes(_matches(metric.options, one.right, said) for one, said in pairs)

    if not metric.options.get("regexes_to_ignore"):
        return [float(one) for one in matches()]
    try:
        return [float(one) for one in limited(matches, LIMITS)]
    except Refused as e:
        raise DataError(f"regexes_to_ignore cannot be applied: {e}; correct the task file.") from None


def _matches(options: Mapping[str, Any], right: Sequence[str], answer: str) -> bool:
    try:
        said = _ignoring(options, answer)
        return any(_ignoring(options, one) == said for one in right)
    except re.error as e:
        raise Refused(f"a pattern is none: {e}") from None


def _right(question: Question, scores: Any) -> float:
    return float(int(np.argmax(scores)) in question.right)


def _ignoring(options: Mapping[str, Any], text: str) -> str:
    for pattern in options.get("regexes_to_ignore") or ():
        text = re.sub(pattern, "", text)
    if options.get("ignore_case"):
        text = text.lower()
    if options.get("ignore_punctuation"):
        text = text.translate(str.maketrans("", "", string.punctuation))
    if options.get("ignore_numbers"):
        text = text.translate(str.maketrans("", "", string.digits))
    return text


def together(metric: str, values: Sequence[Value], clusters: Sequence[Hashable] | None) -> Interval:
    """The figure of a task. Perplexities are what the exponential makes of a mean, and so are their bounds."""
    tops = [value[0] if isinstance(value, tuple) else value for value in values]
    bottoms = [value[1] for value in values if isinstance(value, tuple)]
    match MEASURES[metric].aggregation:
        case "mean":
            return interval(tops, clusters)
        case "perplexity":
            return _exp(interval([-one for one in tops], clusters))
        case "weighted_perplexity":
            return _exp(interval_of_ratio([-one for one in tops], bottoms, clusters))
    return interval_of_ratio([-one / math.log(2) for one in tops], bottoms, clusters)


def per_item(metric: str, values: Sequence[Value]) -> list[float]:
    """For a paired test: a number an item, in the measure's unit and direction."""
    nats = [-(value[0] / value[1]) if isinstance(value, tuple) else value for value in values]
    match MEASURES[metric].aggregation:
        case "perplexity":
            return [-one for one in nats]
        case "bits_per_byte":
            return [one / math.log(2) for one in nats]
    return nats


def _exp(found: Interval) -> Interval:
    """The error by the first order, as far as a float goes."""
    mean, low, high = (math.exp(min(one, 700.0)) for one in (found.mean, found.low, found.high))
    return replace(found, mean=mean, low=low, high=high, stderr=found.stderr * mean, method=f"exp of {found.method}")
