"""The windows of a data source of the user's own (`own.data`): asked for by number, checked, laid into batches.

    class Source:
        fingerprint = "digits of pi, 2026-11"             # what data it is; a run goes on with the same alone
        def __init__(self, run): ...
        def __len__(self): ...                            # windows
        def __getitem__(self, i): ...                     # data.seq_len + 1 token ids, or a dict: see `KEYS`

Which windows a step reads is for the order to say, as with prepared data; so the same number must always give the same
window, in every process. Errors of the source itself are left as they are, for they show its line.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from shoal.data.order import LARGEST
from shoal.data.windows import I64, NO_TARGET, PADDING, AnyWindows, Batch
from shoal.errors import DataError, ShoalError
from shoal.leaving import own_place
from shoal.spec.run import Run

KEYS = ("tokens", "targets", "documents", "positions")  # data.seq_len numbers each; the last two may be left out
IS_PADDING = -1  # as a document's number
MOST_CHARS = 1000  # of a fingerprint


@dataclass(frozen=True)
class Identity:
    """What data it is, as a checkpoint remembers it (as of an index: `shoal.data.index`)."""

    fingerprint: str
    sums: str = ""


class _Row(NamedTuple):
    """As in a `Batch`, [seq]."""

    tokens: I64
    targets: I64
    positions: I64
    documents: npt.NDArray[np.int32]


class OwnWindows(AnyWindows):
    """`make(run)` gives the source."""

    def __init__(self, make: Callable[[Run], Any], run: Run) -> None:
        self._name = f"own.data {run.own.data}"
        self._length, self._longest = run.data.seq_len, run.model.max_seq_len
        self._source = self._made(make, run)
        self._size = self._counted()
        self.said = self._fingerprint()
        self._vocab = self._vocabulary(int(run.model.vocab_size))
        self._alone = threading.Lock()  # feeds ask from threads of theirs, and few sources are made for two at once
        self.several = bool(self._row(0).documents.any())  # those of the others are kept apart as well, only slower

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self._size,)

    @property
    def identity(self) -> Identity:
        return Identity(hashlib.sha256(f"{self._size} {self.said}".encode()).hexdigest())

    def batch(self, sources: npt.ArrayLike, windows: npt.ArrayLike) -> Batch:
        rows = [self._row(i) for i in np.asarray(windows, np.int64).tolist()]
        batch = Batch(*(np.stack(of_all) for of_all in zip(*rows, strict=True)))
        _ = batch.lengths, batch.token_count  # counted in the thread that assembles, not when the step wants it
        return batch

    def _row(self, i: int) -> _Row:
        with self._alone:
            given = self._source[i]
        if not isinstance(given, Mapping):
            ids = self._numbers(i, "its ids", given, self._length + 1, 0, self._vocab - 1)
            return _Row(ids[:-1], ids[1:], np.arange(self._length), np.zeros(self._length, np.int32))
        if strange := [key for key in given if key not in KEYS]:
            self._refuse(i, f"has `{strange[0]}`, and a window has {', '.join(KEYS)}")
        for key in KEYS[:2]:
            if key not in given:
                self._refuse(i, f"has no `{key}`: give tokens and targets, or the ids alone, without a dict")
        tokens = self._numbers(i, "`tokens`", given["tokens"], self._length, 0, self._vocab - 1)
        targets = self._numbers(i, "`targets`", given["targets"], self._length, 0, self._vocab - 1, but=NO_TARGET)
        documents = self._documents(i, given.get("documents"), targets)
        positions = given.get("positions")
        if positions is None:
            return _Row(tokens, targets, _positions(documents), documents)
        found = self._numbers(i, "`positions`", positions, self._length, 0, self._longest - 1)
        return _Row(tokens, targets, found, documents)

    def _documents(self, i: int, given: object, targets: I64) -> npt.NDArray[np.int32]:
        """Counted from 0, padding last."""
        if given is None:
            return np.zeros(self._length, np.int32)
        named = self._numbers(i, "`documents`", given, self._length, 0, PADDING - 1, but=IS_PADDING)
        named[named == IS_PADDING] = PADDING
        steps = np.diff(named)
        if (steps < 0).any():
            self._refuse(i, f"has documents that do not rise: number them in their order, padding ({IS_PADDING}) last")
        if (targets[named == PADDING] != NO_TARGET).any():
            self._refuse(i, f"has targets in its padding: set them to {NO_TARGET}")
        counted = np.concatenate([[0], np.cumsum(steps > 0)]).astype(np.int32)
        counted[named == PADDING] = PADDING
        return counted

    def _numbers(
        self, i: int, what: str, given: object, length: int, low: int, high: int, but: int | None = None
    ) -> I64:
        """A copy: what a source keeps stays as it is."""
        try:
            found = np.asarray(given)
        except (TypeError, ValueError, RuntimeError):  # a ragged list; a tensor on a GPU
            self._refuse(i, f"has {what} as {type(given).__name__}, where an array of whole numbers is needed")
        if found.ndim != 1 or found.dtype.kind not in "iu":
            kind = f"shape {list(found.shape)} and type {found.dtype}"
            self._refuse(i, f"has {what} of {kind}, where one row of whole numbers is needed")
        if len(found) != length:
            more = " (data.seq_len and the one after it)" if length > self._length else " (data.seq_len)"
            self._refuse(i, f"has {len(found):,} numbers in {what}, where {length:,} are needed{more}")
        wrong = (found < low) | (found > high)
        if but is not None:
            wrong &= found != but
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            or_but = "" if but is None else f", or {but}"
            self._refuse(i, f"has {found[at]} at place {at} of {what}, where {low} to {high:,}{or_but} may stand")
        return found.astype(np.int64)

    def _refuse(self, i: int, sentence: str) -> NoReturn:
        raise DataError(f"{self._name}: window {i:,} {sentence}.")

    def _made(self, make: Callable[[Run], Any], run: Run) -> Any:
        try:
            return make(run)
        except ShoalError:
            raise
        except Exception as e:
            raise DataError(f"{self._name} could not be made: {own_place(e)}{type(e).__name__}: {e}.") from e

    def _counted(self) -> int:
        for wanted, why in (("__len__", "how many windows it has"), ("__getitem__", "what is in one")):
            if not hasattr(type(self._source), wanted):
                raise DataError(f"{self._name} has no {wanted}, which says {why}.")
        size = len(self._source)
        if not 1 <= size < LARGEST:
            raise DataError(f"{self._name} has {size:,} windows (its __len__), and a run needs one at least.")
        return size

    def _fingerprint(self) -> str:
        said = getattr(self._source, "fingerprint", None)
        if not isinstance(said, str) or not 0 < len(said) <= MOST_CHARS:
            raise DataError(
                f"{self._name} has no `fingerprint`: set it to a text of at most {MOST_CHARS:,} characters that says "
                "what data it is, such as the checksum of its file; a run is not resumed on other data."
            )
        return said

    def _vocabulary(self, of_model: int) -> int:
        said = getattr(self._source, "vocab_size", of_model)
        if isinstance(said, bool) or not isinstance(said, int) or not 1 <= said <= of_model:
            raise DataError(
                f"{self._name} says vocab_size {said}, where a whole number up to model.vocab_size {of_model:,} may "
                "stand: correct one of them."
            )
        return said


def _positions(documents: npt.NDArray[np.int32]) -> I64:
    """Places in each document."""
    at = np.arange(len(documents))
    begins = np.concatenate([[True], documents[1:] != documents[:-1]])
    return at - np.maximum.accumulate(np.where(begins, at, 0))
