"""The one door to the `tokenizers` library: what it is given is bounded first, and whatever it raises is one sentence.

The library is written in Rust. It raises bare `Exception` for most of what is wrong with a file; where it did not
expect something it panics, which Python sees as a `BaseException` that no `except Exception` catches. It looks at no
sizes, and cannot be interrupted; where the system gives it no memory it aborts the process, which nothing here can
catch. So counts are looked at here, and patterns that could take for ever are refused: a pattern is run on every text
that is ever encoded.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shoal.data.broken import first_line
from shoal.errors import DataError, ShoalError
from shoal.values import BadValue, inside, items, shown, table, text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

MOST_BYTES = 128 << 20  # of a tokenizer.json; the largest that are published have 35 MB
MOST_TOKENS = 4_000_000
MOST_ID = 4 * MOST_TOKENS  # vocabularies have holes, for each of which the library takes memory
MOST_STEPS = 256  # normalizers, pre-tokenizers and decoders
MOST_PATTERN_CHARS = 16_384
MOST_TOKEN_CHARS = 16_384
MOST_GROWTH = 4096  # how many times as long normalizers may make a text
_STEP_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")


@contextmanager
def asking(where: str, what: str = "give a tokenizer.json that the tokenizers library can read") -> Iterator[None]:
    """Whatever the library raises in here becomes one sentence about `where`."""
    try:
        yield
    except (ShoalError, BadValue):
        raise
    except BaseException as e:
        if isinstance(e, Exception) or is_panic(e):
            raise DataError(f"{where} is no tokenizer that can be used ({first_line(e)}); {what}.") from None
        raise


@contextmanager
def asking_quietly(where: str) -> Iterator[None]:
    """As `asking`; and what the library itself writes to stderr when it panics is not shown."""
    with asking(where), _held_back():
        yield


def is_panic(e: BaseException) -> bool:
    return type(e).__name__ == "PanicException"


def build(content: str, where: str) -> Library:
    """The library's tokenizer of a tokenizer.json that is `bounded`."""
    from tokenizers import Tokenizer as Library

    with asking_quietly(where):
        library = Library.from_str(content)
        look_at_added(library)
        return library


def look_at_added(library: Library) -> None:
    """A token of which the normalizer leaves nothing is found between any two letters: the library (0.23) then never
    ends, taking memory all the while, or panics. So it is with a line break beside a normalizer that strips."""
    if library.normalizer is None:
        return
    for token in library.get_added_tokens_decoder().values():
        if token.normalized and not library.normalizer.normalize_str(token.content):
            raise ValueError(f"the normalizer leaves nothing of the added token {token.content[:40]!r}")


def bounded(spec: Mapping[str, Any], where: str) -> None:
    """Refuses what would take the library too long or too much memory."""
    try:
        _bound(spec)
    except BadValue as e:
        raise DataError(f"{where} is no tokenizer that can be used ({e}); give a tokenizer.json.") from None


def _bound(spec: Mapping[str, Any]) -> None:
    with inside("model"):
        model = table(spec.get("model"), 1000)
        vocab = model.get("vocab")
        with inside("vocab"):
            pieces = [entry[0] for entry in _pairs(vocab)] if isinstance(vocab, list) else table(vocab, MOST_TOKENS)
            if any(type(piece) is not str or len(piece) > MOST_TOKEN_CHARS for piece in pieces):
                raise BadValue(f"a token that is no text of at most {MOST_TOKEN_CHARS:,} characters")
            bound_ids(vocab.values() if isinstance(vocab, dict) else ())
        with inside("merges"):
            items(model.get("merges") or [], MOST_TOKENS)
    with inside("added_tokens"):
        for token in items(spec.get("added_tokens") or [], MOST_TOKENS):
            text(table(token, 100).get("content"), MOST_TOKEN_CHARS)
            bound_ids([token.get("id")])
    for key in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        with inside(key):
            _bound_steps(flat(spec.get(key)))
    with inside("post_processor"):
        for step in flat(spec.get("post_processor")):
            _bound_template(step.get("single"))


def _bound_template(pieces: object) -> None:
    """One that has the text many times makes ids without end of a short text, and no cut of a long one is exact."""
    if isinstance(pieces, list):
        count = sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces)
        if count != 1:
            raise BadValue(f"a template that has the text {count} times")


def bound_ids(ids: Iterable[object]) -> None:
    if any(isinstance(i, int) and i > MOST_ID for i in ids):  # what is no id, the library refuses
        raise BadValue(f"an id above {MOST_ID:,}")


def _pairs(said: object) -> list[Any]:
    entries = items(said, MOST_TOKENS)
    if not all(isinstance(entry, list) and len(entry) == 2 for entry in entries):
        raise BadValue("something else than a token and its score")
    return entries


def _bound_steps(steps: list[Mapping[str, Any]]) -> None:
    if len(steps) > MOST_STEPS:
        raise BadValue(f"more than {MOST_STEPS} steps")
    growth = 1
    for step in steps:
        pattern = step.get("pattern")
        for kind, said in (pattern if isinstance(pattern, dict) else {}).items():
            with inside("pattern"):
                text(said, MOST_PATTERN_CHARS)
                if kind == "Regex" and (why := endless(said)) is not None:
                    raise BadValue(f"'{shown(said)}' {why}")
        growth *= max(1, len(text(step.get("content") or "", MOST_PATTERN_CHARS)))
        if growth > MOST_GROWTH:
            raise BadValue(f"its steps may make a text more than {MOST_GROWTH:,} times as long")


def flat(step: object) -> list[Mapping[str, Any]]:
    """The steps of a pipeline, sequences within it opened."""
    if step is None:
        return []
    if not isinstance(step, dict):
        raise BadValue("something else than a step of a pipeline")
    if step.get("type") != "Sequence":
        return [step]
    inner: object = next((step[key] for key in _STEP_LISTS if key in step), [])
    return [one for part in items(inner, MOST_STEPS) for one in flat(part)]


# What follows an atom to have it many times over. {3} and {1,3} are bounded.
_REPEATED = re.compile(r"[*+]|\{\d*,\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[[^\]]*\]|[^\]\\])*\]", re.DOTALL)


def endless(pattern: str) -> str | None:
    """Why a pattern could take a time that grows exponentially with the text: something repeated without a bound
    within something repeated without a bound, as in (a+)+. No published tokenizer has such a one."""
    bare = _CLASS.sub("x", re.sub(r"\\(?:[pP]\{[^}]*\}|.)", "x", pattern, flags=re.DOTALL))
    opened: list[bool] = [False]
    i = 0
    while i < len(bare):
        if bare[i] == "(":
            opened.append(False)
        elif bare[i] == ")" and len(opened) > 1:
            repeats = opened.pop()
            if repeats and _REPEATED.match(bare, i + 1):
                return "repeats a group that repeats, which may take for ever"
            opened[-1] = opened[-1] or repeats or _REPEATED.match(bare, i + 1) is not None
        elif bare[i] in "*+" or _REPEATED.match(bare, i):
            opened[-1] = True
        i += 1
    return None


@contextmanager
def _held_back() -> Iterator[None]:
    """What reaches stderr meanwhile, from whatever thread, is written afterwards; of a panic nothing is."""
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, ValueError, AttributeError):  # there is no stderr
        yield
        return
    panicked = False
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException as e:
            panicked = is_panic(e)
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            if not panicked:
                held.seek(0)
                if said := held.read():
                    os.write(2, said)
