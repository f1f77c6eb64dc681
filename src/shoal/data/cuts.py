"""Where a long text may be cut so that the ids of its pieces, one after the other, are the ids of the whole.

The library needs about 200 bytes a character while it encodes, so long documents are encoded in pieces. A place is
taken only if it is proven for this tokenizer and the characters around the place, step by step:

- no added token reaches over it, nor swallows the blanks around it;
- normalizers do the same to both sides apart as together;
- no pre-tokenizer has a piece that holds both sides (`shoal.data.patterns` for those with an expression), and one of
  them always cuts there. Models work within pieces, so that is enough. If none cuts, a BPE is still known: merges join
  what they name and nothing else, so no token reaches over two characters that no merge puts side by side;
- what is done at the beginning of a text (a blank put before it) is not done to the second piece.

A text without such a place is encoded whole. docs/decisions/066 has the reasons and what they cost.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.data.patterns import read
from shoal.data.tokenizer_library import flat
from shoal.data.word_ids import GPT2

NEAR = 64  # characters of either side that normalizers are tried on
TRIES = 4096  # places of one kind that are looked at before a text is taken to have none there
_LOCAL = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Nmt", "Precompiled"}
_BLANKS = (" ", "\n", "\t", "\r")
Step = Mapping[str, Any]


def cuts_of(spec: Mapping[str, Any], special: bool) -> Cuts | None:
    """None: nothing can be proven about this tokenizer. `special`: special tokens are found in texts."""
    normalizers, splitters = flat(spec.get("normalizer")), flat(spec.get("pre_tokenizer"))
    ways = [_way(step, last=i == len(splitters) - 1) for i, step in enumerate(splitters)]
    if not all(map(_normal, normalizers)) or None in ways:
        return None
    tokens = [t for t in spec.get("added_tokens") or [] if t.get("content") and (special or not t.get("special"))]
    joined = _joined(spec["model"])
    if joined is None and not any(way is not None and way.cuts for way in ways):
        return None
    return Cuts(normalizers, [way for way in ways if way is not None], tokens, joined)


def without_prefix(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer for a piece that does not begin a text."""
    steps = [step for step in flat(spec.get("normalizer")) if step["type"] != "Prepend"]
    return {**spec, "normalizer": {"type": "Sequence", "normalizers": steps}}


class Cuts:
    def __init__(
        self,
        normalizers: Sequence[Step],
        ways: Sequence[Way],
        tokens: Sequence[Mapping[str, Any]],
        joined: tuple[set[tuple[str, str]], set[str]] | None,
    ) -> None:
        self._ways, self._tokens, self._joined = ways, tokens, joined
        self.prepends = any(step["type"] == "Prepend" for step in normalizers)
        strips = [step for step in normalizers if step["type"] == "Strip"]
        self._strips_left = any(step.get("strip_left") for step in strips)
        self._strips_right = any(step.get("strip_right") for step in strips)
        self._patterns = [p for step in normalizers if (p := _replaced(step)) is not None]
        self._normal = _normalizer(normalizers)
        self._known: dict[tuple[str, str, str], bool] = {}
        self._longest = max((len(token["content"]) for token in tokens), default=0)

    def pieces(self, text: str, size: int) -> list[str]:
        """The text in pieces of at most `size` characters, or longer where there is no place to cut."""
        found, begin = [], 0
        while len(text) - begin > size:
            at = self._place(text, begin, begin + size)
            if at is None:
                break
            found.append(text[begin:at])
            begin = at
        found.append(text[begin:])
        return [text] if self.prepends and any(map(self._holds_a_token, found)) else found

    def exact(self, text: str, at: int, begin: int = 0) -> bool:
        """Whether the ids of text[begin:at] and those of text[at:] are the ids of text[begin:]."""
        before, x, y = text[max(begin, at - 2) : at - 1], text[at - 1], text[at]
        key = before, x, y
        if (known := self._known.get(key)) is None:
            if len(self._known) > 1 << 16:
                self._known.clear()
            known = self._known[key] = self._apart(*key)
        return known and self._clear(text, at, begin)

    def _place(self, text: str, begin: int, end: int) -> int | None:
        """The last place up to `end`, or else the first one after it: blanks, line ends, and then anywhere."""
        for mark, offset in ((" ", 0), ("\n", 1)):
            at = text.rfind(mark, begin, end)
            for _ in range(TRIES):
                if at <= begin:
                    break
                if at + offset > begin and at + offset < len(text) and self.exact(text, at + offset, begin):
                    return at + offset
                at = text.rfind(mark, begin, at)
        anywhere = range(end, max(begin, end - TRIES), -1) if self._joined is not None else ()
        for at in anywhere:
            if self.exact(text, at, begin):
                return at
        for at in range(end + 1, len(text)):
            if (text[at] == " " or text[at - 1] == "\n" or self._joined is not None) and self.exact(text, at, begin):
                return at
        return None

    def _holds_a_token(self, piece: str) -> bool:
        """What follows an added token begins anew, with all that is put before a beginning."""
        normal = self._normal(piece) if any(token.get("normalized") for token in self._tokens) else piece
        return any(token["content"] in piece or self._normal(token["content"]) in normal for token in self._tokens)

    def _apart(self, before: str, x: str, y: str) -> bool:
        """By the two characters alone."""
        if unicodedata.combining(y) or unicodedata.category(y) in ("Mn", "Mc", "Me", "Cn", "Cf", "Cs"):
            return False
        if unicodedata.category(x) in ("Cn", "Cf", "Cs") or (y != " " and x != "\n" and not _plain(x)):
            return False
        left, right = self._normal(x), self._normal(y)
        if not left or not right or self._normal(x + y) != left + right:
            return False
        if (left[-1].isspace() and not x.isspace()) or (right[0].isspace() and not y.isspace()):
            return False  # a blank that stands nowhere in the text: what begins there is not told by the text
        before, x, y = self._normal(before)[-1:], left[-1], right[0]
        if (self._strips_left and y.isspace()) or (self._strips_right and x.isspace()):
            return False
        cut = False
        for way in self._ways:
            if not way.apart(before, x, y) or (way.begins is not None and not way.begins(y, cut)):
                return False
            cut = cut or way.cuts(x, y) if way.cuts is not None else cut
            before, x, y = way.becomes(before)[-1:], way.becomes(x)[-1], way.becomes(y)[0]
        if cut or self._joined is None:
            return cut
        pairs, letters = self._joined
        return x in letters and y in letters and (x, y) not in pairs

    def _clear(self, text: str, at: int, begin: int) -> bool:
        """By what stands around the place: patterns of normalizers, and added tokens."""
        left, right = text[max(begin, at - NEAR) : at], text[at : at + NEAR]
        if self._patterns:
            if self._normal(left + right) != self._normal(left) + self._normal(right):
                return False
            if not all(_misses(pattern, left, right) for pattern in self._patterns):
                return False
        return not any(self._touches(token, text, at, begin) for token in self._tokens)

    def _touches(self, token: Mapping[str, Any], text: str, at: int, begin: int) -> bool:
        content = token["content"]
        if _across(content, text, at):
            return True
        if token.get("normalized"):
            wide = self._longest + NEAR
            left, right = self._normal(text[max(begin, at - wide) : at]), self._normal(text[at : at + wide])
            if _across(content, left + right, len(left)) or _across(self._normal(content), left + right, len(left)):
                return True
        if not (token.get("lstrip") or token.get("rstrip") or token.get("single_word")):
            return False
        left, right = text[max(begin, at - 4 * NEAR) : at], text[at : at + 4 * NEAR]
        if not content.strip() or not self._normal(content).strip():  # it may be any blank beside the place
            beside = left[-1] + right[0] + self._normal(left)[-1:] + self._normal(right)[:1]
            return any(map(str.isspace, beside))
        ends = tuple(one for one in {content.strip(), self._normal(content).strip(), content} if one)
        for a, b in ((left.rstrip(), right.lstrip()), (self._normal(left).rstrip(), self._normal(right).lstrip())):
            if not a or not b or a.endswith(ends) or b.startswith(ends):
                return True
        return False


class Way:
    """What a pre-tokenizer does at a place between two characters."""

    def __init__(
        self,
        apart: Callable[[str, str, str], bool],
        cuts: Callable[[str, str], bool] | None = None,
        begins: Callable[[str, bool], bool] | None = None,
        becomes: Callable[[str], str] = str,
    ) -> None:
        self.apart = apart
        """(before, x, y): no piece that it makes holds both for the sake of a match, and x's side needs no y."""
        self.cuts = cuts
        """(x, y): it always cuts between them."""
        self.begins = begins
        """(y, cut already): what it does to the beginning of a text is not done to one that begins with y."""
        self.becomes = becomes
        """What later steps and the model see of a character."""


def _never(before: str, x: str, y: str) -> bool:
    return True


def _at_a_blank(x: str, y: str) -> bool:
    return x in _BLANKS or y in _BLANKS


def _way(step: Step, last: bool) -> Way | None:
    """None: not known."""
    kind = step.get("type")
    if kind == "WhitespaceSplit" or kind == "BertPreTokenizer":
        return Way(_never, _at_a_blank)
    if kind == "Whitespace":
        return _by_pattern(r"\w+|[^\w\s]+", _at_a_blank)
    if kind == "Digits":
        alone = bool(step.get("individual_digits"))
        return Way(
            lambda before, x, y: alone or not (x.isnumeric() and y.isnumeric()),
            lambda x, y: x.isnumeric() != y.isnumeric() and (x + y).isascii(),
        )
    if kind == "Punctuation" and step.get("behavior", "Isolated") in ("Isolated", "Removed"):
        return Way(_never)
    if kind == "CharDelimiterSplit":
        delimiter = step.get("delimiter")
        return Way(_never, lambda x, y: delimiter in (x, y))
    if kind == "Metaspace":
        return _metaspace(step)
    if kind == "ByteLevel" and last:
        prefix = bool(step.get("add_prefix_space", True))
        begins = (lambda y, cut: cut or y == " ") if prefix else None
        found = _by_pattern(GPT2) if step.get("use_regex", True) else Way(_never)
        return None if found is None else Way(found.apart, found.cuts, begins, _bytes_of())
    if kind == "Split":
        return _split(step)
    return None


def _bytes_of() -> Callable[[str], str]:
    """The characters that stand for the bytes of one."""
    from tokenizers import pre_tokenizers

    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return lambda c: "".join(piece for piece, _ in step.pre_tokenize_str(c))


def _by_pattern(expression: str, cuts: Callable[[str, str], bool] | None = None) -> Way | None:
    pattern = read(expression)
    if pattern is None:
        return None
    return Way(pattern.apart, cuts or (lambda x, y: pattern.takes(x) or pattern.takes(y)))


def _metaspace(step: Step) -> Way | None:
    blank = step.get("replacement")
    if not isinstance(blank, str) or len(blank) != 1:
        return None
    scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
    return Way(
        _never,
        (lambda x, y: y in (" ", blank)) if step.get("split", True) else None,
        (lambda y, cut: y in (" ", blank)) if scheme != "never" else None,
        lambda c: blank if c == " " else c,
    )


def _split(step: Step) -> Way | None:
    pattern, behavior = step.get("pattern") or {}, step.get("behavior")
    if "Regex" in pattern:
        if behavior not in ("Isolated", "Removed") or (step.get("invert") and behavior != "Removed"):
            return None
        return _by_pattern(pattern["Regex"])
    mark = pattern.get("String")
    if not isinstance(mark, str) or len(mark) != 1 or step.get("invert"):
        return None
    cuts = {
        "Isolated": lambda x, y: mark in (x, y),
        "Removed": lambda x, y: mark in (x, y),
        "MergedWithNext": lambda x, y: y == mark,
        "MergedWithPrevious": lambda x, y: x == mark,
    }.get(str(behavior))
    return None if cuts is None else Way(_never, cuts)


def _normal(step: Step) -> bool:
    kind = step.get("type")
    if kind == "Replace":
        return _replaced(step) is not None
    return kind in _LOCAL or kind in ("Prepend", "Strip")


def _replaced(step: Step) -> tuple[str, str] | None:
    """The pattern of a Replace: ("String", what) or ("Regex", what)."""
    pattern = step.get("pattern") or {}
    if step.get("type") != "Replace":
        return None
    if isinstance(one := pattern.get("String"), str) and 0 < len(one) < NEAR // 2:
        return "String", one
    if isinstance(one := pattern.get("Regex"), str) and read(one) is not None:
        return "Regex", one
    return None


def _misses(pattern: tuple[str, str], left: str, right: str) -> bool:
    kind, expression = pattern
    if kind == "String":
        return not _across(expression, left + right, len(left))
    found = read(expression)
    return found is not None and found.apart(left[-2:-1], left[-1], right[0])


def _across(content: str, text: str, at: int) -> bool:
    """Whether the content stands in the text so that it begins before the place and ends after it."""
    size = len(content)
    return size > 1 and text.find(content, max(0, at - size + 1), at + size - 1) >= 0


def _normalizer(steps: Sequence[Step]) -> Callable[[str], str]:
    """What is done to characters wherever they stand."""
    import json

    from tokenizers import Tokenizer, models

    inner = [dict(step) for step in steps if step["type"] not in ("Prepend", "Strip")]
    if not inner:
        return lambda text: text
    empty = json.loads(Tokenizer(models.BPE()).to_str())
    made = Tokenizer.from_str(json.dumps({**empty, "normalizer": {"type": "Sequence", "normalizers": inner}}))
    return lambda text: str(made.normalizer.normalize_str(text))


def _joined(model: Mapping[str, Any]) -> tuple[set[tuple[str, str]], set[str]] | None:
    """Of a BPE that works on characters: which two a merge may join, and which are in the vocabulary."""
    odd = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix") or model.get("ignore_merges")
    if model.get("type") != "BPE" or odd or not isinstance(model.get("vocab"), dict):
        return None
    pairs = set()
    for merge in model.get("merges") or []:
        a, b = merge.split(" ", 1) if isinstance(merge, str) else merge
        if a.startswith("<0x") or b.startswith("<0x") or not a or not b:
            return None  # merges of bytes, of which a character may have several
        pairs.add((a[-1], b[0]))
    return pairs, {piece for piece in model["vocab"] if len(piece) == 1}


def _plain(c: str) -> bool:
    """A character that joins no other to a letter: not one that begins a longer one, as some marks of Indic scripts."""
    return c.isascii() or unicodedata.category(c) in ("Lu", "Ll", "Lo", "Nd", "Po")
