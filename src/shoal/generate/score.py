"""How likely texts are, each after a text of its own: many in one forward pass, without a cache.

Several texts lie in one row, and a token sees what stands before it in its own text alone. What texts begin with in
common, as the choices of a question and the examples before several do, stands there once, and all of them see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.generate.request import Scored
from shoal.model.attention import Attention
from shoal.model.decoder import Decoder
from shoal.model.mla import LatentAttention
from shoal.model.own_model import OwnModel

ROW = 512  # tokens that are computed together, where texts are shorter
LEAST_HEAD = 8  # tokens of a common beginning that are worth a stretch of their own
MOST_ALIKE = 64  # contexts that are looked at for it
MOST_LOGITS = 1 << 26  # numbers held at a time

Item = tuple[Sequence[int], Sequence[int]]


@dataclass
class Stretch:
    """Tokens of a row that follow each other, after those of `parent`."""

    tokens: list[int]
    parent: Stretch | None
    place: int = 0  # of its first token in the row
    begin: int = 0  # its position in the text

    def line(self) -> Iterator[Stretch]:
        at: Stretch | None = self
        while at is not None:
            yield at
            at = at.parent


@dataclass
class Row:
    stretches: list[Stretch] = field(default_factory=list)
    asked: list[tuple[int, list[int]]] = field(default_factory=list)  # an item, and the places that predict its tokens
    length: int = 0

    def add(self, tokens: Sequence[int], parent: Stretch | None) -> Stretch:
        begin = 0 if parent is None else parent.begin + len(parent.tokens)
        stretch = Stretch(list(tokens), parent, self.length, begin)
        self.stretches.append(stretch)
        self.length += len(stretch.tokens)
        return stretch


def score(model: Decoder, items: Sequence[Item], exact: bool = False) -> list[Scored]:
    found: dict[int, Scored] = {number: Scored((), True) for number, (_, more) in enumerate(items) if not len(more)}
    asked = [(number, items[number]) for number in range(len(items)) if number not in found]
    if branches(model) and not exact:
        for row in rows_of(asked):
            found |= _scored(model, items, row)
    else:
        for group in _of_one_length(asked):
            found |= _alone(model, items, group)
    return [found[number] for number in range(len(items))]


def branches(model: Decoder) -> bool:
    """Whether all that a token learns of others comes by attention, where a mask says of which."""
    return not isinstance(model, OwnModel) and all(
        isinstance(block.mixer, Attention | LatentAttention) for block in model.blocks.values()
    )


def rows_of(items: Sequence[tuple[int, Item]]) -> Iterator[Row]:
    """Items in rows of about ROW tokens, those with one context beside each other. What the contexts of a row begin
    with in common, as the examples before a question, stands there once, and is not counted."""
    row, head = Row(), NOTHING
    groups = list(_by_context(items))
    for n, (context, group) in enumerate(groups):
        size = sum(len(more) - 1 for _, more in group) + len(context) - len(head.under(context))
        if row.length and row.length - len(head.tokens) + size > ROW:
            yield row
            row, head = Row(), NOTHING
        if not row.length:
            head = Head.of(row, context, [one for one, _ in groups[n + 1 : n + 1 + MOST_ALIKE]])
        shared = row.add(context[len(head.under(context)) :], head.stretch if head.under(context) else None)
        for number, more in group:
            if row.length > len(context) and row.length - len(head.tokens) + len(more) > ROW:
                yield row
                row, head = Row(), NOTHING
                shared = row.add(context, None)
            own = row.add(more[:-1], shared)
            last = shared.place + len(shared.tokens) - 1
            row.asked.append((number, [last, *range(own.place, own.place + len(more) - 1)]))
    if row.length:
        yield row


@dataclass(frozen=True)
class Head:
    """What contexts of a row begin with."""

    tokens: tuple[int, ...] = ()
    stretch: Stretch | None = None

    @classmethod
    def of(cls, row: Row, context: list[int], following: Sequence[list[int]]) -> Head:
        """Of an empty row: what saves most, shared by few or by many. Each keeps a token of its own."""
        best, most = 0, 0
        for sharing, other in enumerate(following, start=1):
            common = _common(context, other)
            if common < LEAST_HEAD:  # they are sorted: none that follows has more
                break
            best, most = (common, common * sharing) if common * sharing > most else (best, most)
        return cls(tuple(context[:best]), row.add(context[:best], None)) if best else NOTHING

    def under(self, context: list[int]) -> tuple[int, ...]:
        """Its tokens where a context goes on from them, else none."""
        begins = len(context) > len(self.tokens) and tuple(context[: len(self.tokens)]) == self.tokens
        return self.tokens if begins else ()


NOTHING = Head()


def _common(a: list[int], b: list[int]) -> int:
    most = min(len(a), len(b)) - 1
    return next((i for i in range(most) if a[i] != b[i]), max(most, 0))


def _by_context(items: Sequence[tuple[int, Item]]) -> Iterator[tuple[list[int], list[tuple[int, list[int]]]]]:
    """Those that begin alike beside each other. A text without a context begins with its own first token, of which
    nothing can be said."""
    groups: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    for number, (context, more) in items:
        groups.setdefault(tuple(context), []).append((number, list(more)))
    for context in sorted(groups):
        yield list(context), groups[context]


@torch.no_grad()
def _scored(model: Decoder, items: Sequence[Item], row: Row) -> dict[int, Scored]:
    device = next(model.parameters()).device
    tokens = torch.tensor([[token for s in row.stretches for token in s.tokens]], device=device)
    positions = torch.tensor([[s.begin + i for s in row.stretches for i in range(len(s.tokens))]], device=device)
    seen = seen_in(row).to(device)
    before = model.mask
    distance = positions[0, :, None] - positions[0, None, :]

    def mask(documents: Tensor | None, seq: int, window: int | None, device: torch.device) -> Tensor:
        return (seen if window is None else seen & (distance < window))[None, None]

    model.mask = mask
    try:
        hidden = model.hidden(tokens, positions)[0]
    finally:
        model.mask = before
    return _read(model, items, hidden, row.asked)


def seen_in(row: Row) -> Tensor:
    """Who sees whom: [tokens, tokens]."""
    seen = torch.zeros(row.length, row.length, dtype=torch.bool)
    for stretch in row.stretches:
        mine = slice(stretch.place, stretch.place + len(stretch.tokens))
        seen[mine, mine] = torch.ones(len(stretch.tokens), len(stretch.tokens), dtype=torch.bool).tril()
        for other in stretch.line():
            if other is not stretch:
                seen[mine, other.place : other.place + len(other.tokens)] = True
    return seen


def _read(
    model: Decoder, items: Sequence[Item], hidden: Tensor, asked: Sequence[tuple[int, list[int]]]
) -> dict[int, Scored]:
    """`hidden` [tokens, dim]. Only the places that are asked for get logits."""
    tied = model.embed.weight if model.shape.tie_embeddings else None
    places = torch.tensor([place for _, each in asked for place in each], device=hidden.device)
    wanted = torch.tensor([int(t) for number, _ in asked for t in items[number][1]], device=hidden.device)
    logprobs, best = [], []
    most = max(1, MOST_LOGITS // model.shape.vocab_size)
    for at in range(0, len(places), most):
        logits = model.head(hidden[places[at : at + most]][None], tied, None)[0]
        picked, likeliest = chosen(logits, wanted[at : at + most])
        logprobs += picked
        best += likeliest
    found, begin = {}, 0
    for number, each in asked:
        end = begin + len(each)
        found[number] = Scored(tuple(logprobs[begin:end]), all(best[begin:end]))
        begin = end
    return found


def chosen(logits: Tensor, tokens: Tensor) -> tuple[list[float], list[bool]]:
    """Of each row of logits [rows, vocab], what it thinks of a token, and whether that was the likeliest."""
    spread = F.log_softmax(logits, -1, dtype=torch.float32)
    return spread.gather(-1, tokens[:, None])[:, 0].tolist(), (spread.argmax(-1) == tokens).tolist()


def _of_one_length(items: Sequence[tuple[int, Item]]) -> Iterator[list[int]]:
    """Rows that are equally long, so that nothing fills them up."""
    by_length: dict[int, list[int]] = {}
    for number, (context, more) in items:
        by_length.setdefault(len(context) + len(more) - 1, []).append(number)
    for length, numbers in sorted(by_length.items()):
        most = max(1, ROW // max(1, length))
        for at in range(0, len(numbers), most):
            yield numbers[at : at + most]


@torch.no_grad()
def _alone(model: Decoder, items: Sequence[Item], numbers: Sequence[int]) -> dict[int, Scored]:
    device = next(model.parameters()).device
    whole = [[*items[number][0], *items[number][1]][:-1] for number in numbers]
    logits = model(torch.tensor(whole, device=device))
    found = {}
    for number, row in zip(numbers, logits, strict=True):
        more = items[number][1]
        picked, best = chosen(row[len(row) - len(more) :], torch.tensor(list(more), device=device))
        found[number] = Scored(tuple(picked), all(best))
    return found
