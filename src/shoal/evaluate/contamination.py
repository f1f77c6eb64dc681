"""Whether a model was trained on what it is asked: runs of 13 words that a task's items share with training data.

As GPT-3's authors looked for it: letters and digits alone, without case, so that another layout hides nothing. The data
is read as it lies in its shards, decoded a stretch at a time; what is held is a number for each run of the items.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.data.shards import TokenShards
from shoal.data.tokenizer import Tokenizer, tokenizer_of
from shoal.errors import DataError

WORDS = 13
STRETCH = 1 << 16  # tokens that are decoded at once
OVERLAP = 512  # a run that lies across two stretches is whole in one of them: 13 words of 512 bytes, and more in tokens
MOST_RUNS = 20_000_000
WORST = 10
EXCERPT = 90  # letters

# Scripts that write no blanks between words: each letter of them counts as one.
_BLANKLESS = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_BLANKLESS}]|[^\W_{_BLANKLESS}]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Numbers = NDArray[np.uint64]


@dataclass(frozen=True)
class Text:
    """What a model may have seen of an item: the question with its right answer, without examples."""

    task: str
    item: str
    text: str


@dataclass(frozen=True)
class Seen:
    """An item of which the data has a part."""

    task: str
    item: str
    share: float
    """Of its runs of 13 words."""
    where: str
    excerpt: str
    """What is in both, as the item has it."""


@dataclass(frozen=True)
class Contamination:
    items: int
    short: int
    """Items of fewer than 13 words: nothing can be said of them."""
    seen: int
    mostly: int
    """Those of which more than half was seen."""
    worst: tuple[Seen, ...]
    tokens: int
    """Of data that were read."""
    tasks: dict[str, int] = field(default_factory=dict)
    """Items seen, by task."""


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def contamination(
    texts: Sequence[Text], sources: Sequence[TokenShards], read: Callable[[int], object] = lambda tokens: None
) -> Contamination:
    """`read` is told how many tokens were looked at."""
    runs = Runs(texts)
    for number, source in enumerate(sources):
        tokenizer = tokenizer_of(source)
        for begin, stop in stretches(source.tokens):
            runs.look(_text(source, tokenizer, begin, stop), number, begin)
            read(stop - begin)
    shares = runs.shares()
    seen = [k for k in np.argsort(-shares, kind="stable").tolist() if shares[k] > 0]
    told = [_seen(runs, sources, texts[k], k, float(shares[k])) for k in seen[:WORST]]
    by_task: dict[str, int] = {text.task: 0 for text in texts}
    for k in seen:
        by_task[texts[k].task] += 1
    short = sum(length == 0 for length in runs.lengths)
    tokens = sum(source.tokens for source in sources)
    return Contamination(len(texts), short, len(seen), int((shares > 0.5).sum()), tuple(told), tokens, by_task)


def sentence(found: Contamination) -> str:
    of = f"{found.items - found.short:,} items"
    short = f" ({found.short:,} more are shorter than {WORDS} words, and were not looked for)" if found.short else ""
    if found.items == found.short:
        return f"every item is shorter than {WORDS} words: whether they are in the data cannot be said."
    if not found.seen:
        return f"none of {of} has {WORDS} words in a row with the data in common{short}."
    return (
        f"{found.seen:,} of {of} have {WORDS} words in a row with the data in common, and {found.mostly:,} of them "
        f"more than half of what they say{short}: what a model scores on them may be what it remembers."
    )


class Runs:
    """The runs of all items as sorted numbers, and which of them were seen. A number has 64 bits: two runs with one
    number are not to be expected in less than billions of billions of pairs."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self._known: dict[str, int] = {}
        each = [self._numbers(words_of(text.text), learn=True) for text in texts]
        self.lengths = [max(0, len(ids) - WORDS + 1) for ids in each]
        if sum(self.lengths) > MOST_RUNS:
            raise DataError(
                f"the items have {sum(self.lengths):,} runs of {WORDS} words, and {MOST_RUNS:,} can be held; look with "
                "--limit, or at fewer tasks at once."
            )
        self._runs = [hashed(ids) for ids in each]
        self._all: Numbers = np.unique(np.concatenate([np.empty(0, np.uint64), *self._runs]))
        self._source = np.full(len(self._all), -1, np.int32)
        self._begin = np.zeros(len(self._all), np.int64)

    def look(self, text: str, source: int, begin: int) -> None:
        """At a stretch of data. What was seen first is kept."""
        found = self.places(text)
        new = found[self._source[found] < 0]
        self._source[new], self._begin[new] = source, begin

    def places(self, text: str) -> NDArray[np.int64]:
        """Of the known runs in a text."""
        ids = self._numbers(words_of(text), learn=False)
        numbers = hashed(ids)
        if not len(numbers) or not len(self._all):
            return np.empty(0, np.int64)
        at = np.minimum(np.searchsorted(self._all, numbers), len(self._all) - 1)
        return np.unique(at[self._all[at] == numbers])

    def shares(self) -> NDArray[np.float64]:
        """Of each item: of its runs, those that were seen."""
        seen = self._source >= 0
        return np.array([float(seen[self.of(k)].mean()) if len(self._runs[k]) else 0.0 for k in range(len(self._runs))])

    def of(self, item: int) -> NDArray[np.int64]:
        """The places of its runs."""
        return np.searchsorted(self._all, self._runs[item])

    def first(self, item: int) -> tuple[int, int, int, int]:
        """Of the first of its runs that was seen: which of its words it begins with, its place, the source, and where
        the stretch begins."""
        places = self.of(item)
        which = int(np.flatnonzero(self._source[places] >= 0)[0])
        place = int(places[which])
        return which, place, int(self._source[place]), int(self._begin[place])

    def _numbers(self, words: Sequence[str], learn: bool) -> Numbers:
        """From 1; 0 is a word that no item has."""
        if learn:
            told = (self._known.setdefault(word, len(self._known) + 1) for word in words)
        else:
            told = (self._known.get(word, 0) for word in words)
        return np.fromiter(told, np.uint64, len(words))


def hashed(ids: Numbers) -> Numbers:
    """A number for each run of 13 words, of which all are known."""
    if len(ids) < WORDS:
        return np.empty(0, np.uint64)
    unknown = np.concatenate([[0], np.cumsum(ids == 0)])
    starts = np.flatnonzero(unknown[WORDS:] == unknown[:-WORDS])
    total = np.zeros(len(starts), np.uint64)
    for k in range(WORDS):
        total = total * _FACTOR + spread(ids[starts + k])
    return total


def spread(ids: Numbers) -> Numbers:
    """Neighbouring numbers to numbers far apart (the end of splitmix64): else sums of small ones would be alike."""
    x = ids * _FACTOR
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stretches(tokens: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, tokens, STRETCH):
        yield begin, min(begin + STRETCH + OVERLAP, tokens)


def _text(source: TokenShards, tokenizer: Tokenizer, begin: int, stop: int) -> str:
    """Document by document: a run does not go on from one to the next."""
    tokens, ends, _ = source.read(begin, stop)
    parts = np.split(tokens, ends[ends < len(tokens)])
    return f" \x00{_NOBODY} ".join(tokenizer.decode(part.tolist()) for part in parts)


_NOBODY = "0" * 40  # a word between documents, that no item has


def _seen(runs: Runs, sources: Sequence[TokenShards], text: Text, item: int, share: float) -> Seen:
    which, place, number, begin = runs.first(item)
    source = sources[number]
    spans = [match.span() for match in _WORD.finditer(text.text.lower())]
    said = " ".join(text.text[spans[which][0] : spans[which + WORDS - 1][1]].split())[:EXCERPT]
    return Seen(text.task, text.item, share, f"{source.where}, {_document(runs, source, begin, place)}", said)


def _document(runs: Runs, source: TokenShards, begin: int, place: int) -> str:
    """Which of the documents in a stretch has the run."""
    tokenizer = tokenizer_of(source)
    stop = min(begin + STRETCH + OVERLAP, source.tokens)
    _, ends, _ = source.read(begin, stop)
    edges = [0, *[int(end) for end in ends if end < stop - begin], stop - begin]
    for k, (low, high) in enumerate(itertools.pairwise(edges)):
        tokens, _, _ = source.read(begin + low, begin + high)
        if place in runs.places(tokenizer.decode(tokens.tolist())):
            return f"document {_before(source, begin) + k:,}"
    return f"near token {begin:,}"


def _before(source: TokenShards, token: int) -> int:
    """How many documents end before a token of the stream."""
    which = int(np.searchsorted(source.starts, token, side="right")) - 1
    whole = sum(shard.documents for shard in source.index.shards[:which])
    return whole + int(np.searchsorted(source.shard(which).ends, token - int(source.starts[which]), side="right"))
