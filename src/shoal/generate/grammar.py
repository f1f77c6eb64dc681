"""Answers in a form: a JSON schema, any JSON, a regular expression, a grammar. Which tokens may come next is xgrammar's
work; here it gets the bytes of each token, forms that it can keep to, and limits.

A form is compiled once, in a child with limits (`shoal.generate.limited`), and kept. A document that was cut off is not
called one: `Forms.holds` looks at the whole text.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.data.tokenizer import Tokenizer
from shoal.errors import UsageError, needs_extra
from shoal.generate.form import GRAMMAR, JSON, MOST_BYTES, REGEX, SCHEMA, Form
from shoal.generate.limited import Allowance, Refused, limited
from shoal.generate.pattern import as_rule
from shoal.generate.request import Stuck
from shoal.generate.schema import mark_of, narrowed
from shoal.values import BadValue

if TYPE_CHECKING:
    from torch import Tensor

_SAID = {SCHEMA: "the schema", JSON: "JSON", REGEX: "the regular expression", GRAMMAR: "the grammar"}
COMPILE = Allowance(cpu_s=20, memory_bytes=2 << 30, answer_bytes=64 << 20)
MOST_KEPT, MOST_KEPT_BYTES = 64, 256 << 20
MOST_STEP_S = 5.0  # of CPU time for the next token: ambiguous grammars take longer with each one
_CONTROL = re.compile(rb"[\x00-\x1f]")
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")  # xgrammar takes them for characters, which UTF-8 does not
_HEX = re.compile(r"\\(x[0-9a-f]{2}|.)", re.DOTALL)
_PREFIX = re.compile(r"^(\[[\d:]+\] )?(\S+\.(cc|h):\d+: )?")


class Forms:
    """The forms of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int] = ()) -> None:
        """`stop_ids` may come where a text may end; the tokenizer's end token is one of them."""
        xgrammar = _library()
        pieces = [b"" if _SURROGATE.search(piece) else piece for piece in tokenizer.token_bytes()]
        self.rows = len(pieces)
        stops = sorted({one for one in (*stop_ids, tokenizer.eos_id) if 0 <= one < self.rows})
        self._stops = frozenset(stops)
        # xgrammar's strings take control characters, which JSON does not, and its separators need none.
        written = [b"" if _CONTROL.search(piece) else piece for piece in pieces]
        self._halves = _Halves.of(pieces)
        raw = xgrammar.VocabType.RAW
        self._infos = {
            True: xgrammar.TokenizerInfo(written, raw, vocab_size=self.rows, stop_token_ids=stops),
            False: xgrammar.TokenizerInfo(pieces, raw, vocab_size=self.rows, stop_token_ids=stops),
        }
        self._kept: OrderedDict[Form, Any] = OrderedDict()

    def mask(self, form: Form) -> FormMask:
        """For one answer. UsageError: the form is none, or cannot be kept to."""
        return FormMask(_library().GrammarMatcher(self._compiled(form)), self.rows, self._stops, self._halves)

    def holds(self, form: Form, text: str) -> bool:
        """Whether it is a whole document of the form."""
        if form.is_json:
            try:
                json.loads(text)
            except (ValueError, RecursionError):
                return False
        matcher = _library().GrammarMatcher(self._compiled(form))
        return bool(matcher.accept_string(text.encode(errors="replace")) and matcher.is_completed())

    def _compiled(self, form: Form) -> Any:
        if form in self._kept:
            self._kept.move_to_end(form)
            return self._kept[form]
        info, xgrammar = self._infos[form.is_json], _library()
        try:
            if len(form.text.encode(errors="replace")) > MOST_BYTES:
                raise Refused(f"it has more than {MOST_BYTES:,} bytes")
            made, patterns = form.text, list[str]()
            if form.kind == SCHEMA:
                made, patterns = narrowed(form.text.encode(errors="replace"))
            elif form.kind == REGEX:
                made = f"root ::= {as_rule(form.text, within_json=False)}"
            said = limited(lambda: _compile(info, form.kind, made, patterns), COMPILE)
        except (BadValue, Refused) as e:
            raise UsageError(f"no answer can be held to {_SAID[form.kind]}: {e}.") from None
        self._kept[form] = xgrammar.CompiledGrammar.deserialize_json(said.decode(), info)
        while len(self._kept) > MOST_KEPT or (len(self._kept) > 1 and self._size() > MOST_KEPT_BYTES):
            self._kept.popitem(last=False)
        return self._kept[form]

    def _size(self) -> int:
        return sum(one.memory_size_bytes for one in self._kept.values())


@dataclass(frozen=True)
class _Halves:
    """Of characters that are none, whose bytes come in two tokens."""

    first: frozenset[int]
    second: Tensor
    """[rows]: not after one of the first."""

    @staticmethod
    def of(pieces: list[bytes]) -> _Halves:
        import torch

        first = frozenset(i for i, piece in enumerate(pieces) if piece.endswith(b"\xed"))
        return _Halves(first, torch.tensor([b"\xa0" <= piece[:1] <= b"\xbf" for piece in pieces]))


class FormMask:
    """A `shoal.generate.request.Mask`: where in a document one answer is."""

    def __init__(self, matcher: Any, rows: int, stops: frozenset[int], halves: _Halves) -> None:
        self._matcher, self._rows = matcher, rows
        self._bits: Tensor = _library().allocate_token_bitmask(1, rows)
        self._stops = sorted(stops)
        self._halves, self._last = halves, -1
        self._next: Tensor | None = None
        self.done = False

    def allowed(self) -> Tensor:
        if self._next is None:
            began = time.thread_time()
            self._matcher.fill_next_token_bitmask(self._bits)
            self._next = _as_bools(self._bits, self._rows)
            if self._last in self._halves.first:
                self._next &= ~self._halves.second
            _not_long(began)
        if not self._next.any():
            raise Stuck("no token of this tokenizer goes on in the form that was asked for")
        return self._next

    def accept(self, token: int) -> None:
        began = time.thread_time()
        if not self._matcher.accept_token(token):
            raise Stuck(f"token {token} is not one that the form allows")
        _not_long(began)
        self._next, self._last = None, token
        self.done = self._matcher.is_terminated() or (self._matcher.is_completed() and self._only_stops())

    def _only_stops(self) -> bool:
        allowed = self.allowed().clone()
        allowed[self._stops] = False
        return not bool(allowed.any())


def _not_long(began: float) -> None:
    if time.thread_time() - began > MOST_STEP_S:
        raise Stuck(f"what may come next takes more than {MOST_STEP_S:g} s to find: the form is ambiguous")


def _as_bools(bits: Tensor, rows: int) -> Tensor:
    """A bit for each token, 32 in a number, as bools: numpy is faster at it than torch."""
    import numpy as np
    import torch

    flat = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")[:rows]
    return torch.from_numpy(flat.view(np.bool_))


def _compile(info: Any, kind: str, text: str, patterns: Sequence[str]) -> bytes:
    """In the child."""
    xgrammar = _library()
    try:
        if kind in (SCHEMA, JSON):  # blanks as `json.dumps` has them: a model may else write blanks for ever
            grammar = xgrammar.Grammar.from_json_schema(text if kind == SCHEMA else "{}", any_whitespace=False)
            text = _HEX.sub(_four_digits, str(grammar)) if patterns else ""
            for i, rule in enumerate(patterns):
                text = text.replace(f'Regex("{mark_of(i)}", json_string=true)', rule)
            if 'Regex("' in text.replace('\\"', ""):
                raise Refused("xgrammar writes a pattern in a way that is not known")
            grammar = text or grammar
        else:
            grammar = text
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        return str(compiler.compile_grammar(grammar).serialize_json()).encode()
    except (RuntimeError, ValueError) as e:  # whatever the library says of it
        first = str(e).strip().splitlines()[:1] or [type(e).__name__]
        raise Refused(_PREFIX.sub("", first[0])[:200].rstrip(". ")) from None


def _four_digits(escape: re.Match[str]) -> str:
    """xgrammar writes a letter as two hexadecimal digits, and reads as many as follow."""
    return f"\\u00{escape[1][1:]}" if len(escape[1]) == 3 else escape[0]


def _library() -> Any:
    try:
        import xgrammar
    except ImportError as e:
        raise needs_extra("xgrammar", "structured", "An answer in a form") from e
    return xgrammar
