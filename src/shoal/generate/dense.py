"""The trainer's decoder with a cache: a row of keys and values for each request, as long as the longest. For a CPU,
where a kernel may read a row as it lies; and on a GPU for state-space layers.

Only the decoder's seams are used (`Decoder.mask`, `Attention.attend`, the state of `Mamba`), so each family, mixture of
experts and block of somebody's own is computed by the code that trains it. A model that is the engine's alone is
computed in fewer and faster kernels where it is of the usual kind (`shoal.generate.flat`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.generate import flat
from shoal.generate.slots import Seat, Slots
from shoal.generate.states import States
from shoal.model import exact
from shoal.model.attention import Attention, attend, attention_mask
from shoal.model.decoder import Decoder
from shoal.model.mamba import Mamba
from shoal.model.mla import LatentAttention

FIRST_LENGTH = 256  # tokens a row has room for at first; twice as many whenever that is not enough


class Rows:
    """Keys and values of one layer: [places, heads, tokens, width], one after the other if they are as wide."""

    def __init__(self, places: int, length: int, k: Tensor, v: Tensor) -> None:
        heads, widths = k.shape[2], (k.shape[3], v.shape[3])
        # Zeros: what a mask hides is read all the same, and NaN times nothing is NaN.
        self.both = k.new_zeros(places, 2 * heads, length, widths[0]) if widths[0] == widths[1] else None
        if self.both is not None:
            self.keys, self.values = self.both.chunk(2, 1)
        else:
            self.keys, self.values = (k.new_zeros(places, heads, length, width) for width in widths)

    def put(self, now: Pass, k: Tensor, v: Tensor) -> None:
        """One token each, k and v [rows, 1, heads, width]."""
        rows, at = now.rows, now.at[:, 0]
        if self.both is None:
            self.keys[rows, :, at], self.values[rows, :, at] = k[:, 0], v[:, 0]
        elif len(rows) == 1:
            torch.cat((k[0, 0], v[0, 0]), out=self.both[now.first, :, now.longest - 1])
        else:
            self.both[rows, :, at] = torch.cat((k[:, 0], v[:, 0]), 1)

    def longer(self, length: int) -> Rows:
        k, v = (t[:, :, :1].transpose(1, 2) for t in (self.keys, self.values))
        new = Rows(self.keys.shape[0], length, k, v)
        for held, old in ((new.keys, self.keys), (new.values, self.values)):
            held[:, :, : old.shape[2]] = old
        return new


@dataclass(frozen=True)
class Pass:
    """What one forward pass is of: tokens `at` [rows, n] of the places `rows`, which rise."""

    rows: Tensor
    at: Tensor
    first: int  # place, and the one after the last
    last: int
    longest: int  # tokens there will be of the longest row
    masks: dict[int | None, Tensor | None]  # by window, of places from the first of them to the last

    @property
    def gaps(self) -> bool:
        return self.last - self.first != len(self.rows)


class Dense:
    """A `Runner`."""

    def __init__(self, model: Decoder, places: int, context: int, exactly: bool = False, alone: bool = False) -> None:
        """`exactly`: the model is in that mode (`shoal.model.exact`). `alone`: it is nobody else's, and its weights may
        be laid out anew."""
        self.model, self.context, self._exact = model, context, exactly
        self._device = next(model.parameters()).device
        self._places, self._length = places, min(FIRST_LENGTH, context)
        self._rows: dict[int, Rows] = {}
        self._pass: Pass | None = None
        self._attending = [
            (layer, block.mixer)
            for layer, block in enumerate(model.blocks.values())
            if isinstance(block.mixer, Attention | LatentAttention)
        ]
        self._flat = flat.Flat(model) if alone and not exactly and flat.fits(model) else None
        whole_rows = len(self._attending) == len(model.blocks)
        self.slots = Slots(places, self._copy if whole_rows else None)
        self._states = [States(b.mixer, places) for b in model.blocks.values() if isinstance(b.mixer, Mamba)]

    def admit(self, tokens: Sequence[int], most: int, version: str) -> Seat | None:
        seat = self.slots.admit(tokens, version)
        if seat is not None and not seat.cached:
            for states in self._states:
                states.standing.empty(seat.number)
        return seat

    def release(self, seat: Seat) -> None:
        self.slots.release(seat)

    @torch.no_grad()
    def prefill(self, seat: Seat, tokens: Sequence[int], every: bool) -> Tensor:
        begin = len(seat.tokens)
        seat.tokens.extend(tokens)
        at = torch.arange(begin, begin + len(tokens), device=self._device)[None]
        hidden = self._forward([list(tokens)], [seat.number], at)
        return self._logits(hidden[0] if every else hidden[0, -1:])

    @torch.no_grad()
    def decode(self, seats: Sequence[Seat], tokens: Sequence[int]) -> Tensor:
        order = sorted(range(len(seats)), key=lambda i: seats[i].number)
        at = torch.tensor([[len(seats[i].tokens)] for i in order], device=self._device)
        for seat, token in zip(seats, tokens, strict=True):
            seat.tokens.append(token)
        hidden = self._forward([[tokens[i]] for i in order], [seats[i].number for i in order], at)[:, 0]
        if order != list(range(len(seats))):
            hidden = hidden[torch.tensor(order, device=self._device).argsort()]
        return self._logits(hidden)

    def _forward(self, tokens: list[list[int]], places: list[int], at: Tensor) -> Tensor:
        longest = int(at.max()) + 1
        if longest > self._length:
            self._grow(longest)
        rows = torch.tensor(places, device=self._device)
        self._pass = Pass(rows, at, places[0], places[-1] + 1, longest, {})
        if self._flat is not None:
            return self._flat(torch.tensor(tokens), at, self._attend).unflatten(0, at.shape)
        with self._seams(rows):
            return self.model.hidden(torch.tensor(tokens, device=self._device), at)

    @contextmanager
    def _seams(self, rows: Tensor) -> Iterator[None]:
        """For one pass: between passes the model is as it was, and may be trained or asked in another way."""
        mask, attends = self.model.mask, [attention.attend for _, attention in self._attending]
        self.model.mask = lambda documents, seq, window, device: window
        for layer, attention in self._attending:
            attention.attend = partial(self._attend, layer)
        for states in self._states:
            states.begin(rows)
        try:
            yield
        finally:
            self.model.mask, self._pass = mask, None
            for (_, attention), attend_before in zip(self._attending, attends, strict=True):
                attention.attend = attend_before
            for states in self._states:
                states.end()

    def _logits(self, hidden: Tensor) -> Tensor:
        if self._flat is not None:
            return self._flat.logits(hidden)
        tied = self.model.embed.weight if self.model.shape.tie_embeddings else None
        return self.model.head(hidden[None], tied, None)[0]

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, groups: int) -> Tensor:
        """q [rows, n, heads, width], k and v of the new tokens: with all that the rows hold."""
        now = self._pass
        assert now is not None
        held = self._held(layer, k, v)
        if q.shape[1] == 1:
            return self._one_each(held, q, k, v, window, now)
        row, begin, end = int(now.rows[0]), int(now.at[0, 0]), now.longest
        held.keys[row, :, begin:end], held.values[row, :, begin:end] = k[0].transpose(0, 1), v[0].transpose(0, 1)
        if self._exact:
            keys, values = (t[row, :, :end].transpose(0, 1) for t in (held.keys, held.values))
            return exact.of_a_text(q[0], keys, values, begin, window)[None]
        if window not in now.masks:
            now.masks[window] = _of_a_prompt(begin, end, window, q.dtype, q.device)
        keys, values = (t[row : row + 1, :, :end].transpose(1, 2) for t in (held.keys, held.values))
        return attend(q, keys, values, now.masks[window], groups)

    def _one_each(self, held: Rows, q: Tensor, k: Tensor, v: Tensor, window: int | None, now: Pass) -> Tensor:
        rows, at = now.rows, now.at[:, 0]
        held.put(now, k, v)
        if self._exact:
            keys, values = (t[rows, :, : now.longest] for t in (held.keys, held.values))
            return exact.of_last_tokens(q[:, 0], keys, values, at, window)[:, None]
        if window not in now.masks:
            now.masks[window] = _of_one_each(rows - now.first, at, now.last - now.first, now.longest, window, q.dtype)
        # Heads that share keys lie side by side: as queries of one head the keys are read once.
        grouped = q[:, 0].unflatten(1, (k.shape[2], -1))  # [rows, key heads, group, width]
        if now.gaps:
            spread = grouped.new_zeros(now.last - now.first, *grouped.shape[1:])
            spread[rows - now.first] = grouped
            grouped = spread
        keys, values = (t[now.first : now.last, :, : now.longest] for t in (held.keys, held.values))
        mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=now.masks[window])
        if now.gaps:
            mixed = mixed[rows - now.first]
        return mixed.flatten(1, 2)[:, None]

    def _held(self, layer: int, k: Tensor, v: Tensor) -> Rows:
        if layer not in self._rows:
            self._rows[layer] = Rows(self._places, self._length, k, v)
        return self._rows[layer]

    def _grow(self, longest: int) -> None:
        while self._length < longest:
            self._length = min(2 * self._length, self.context)
        self._rows = {layer: held.longer(self._length) for layer, held in self._rows.items()}

    def _copy(self, source: int, target: int, tokens: int) -> None:
        for held in self._rows.values():
            for t in (held.keys, held.values):
                t[target, :, :tokens] = t[source, :, :tokens]


def _of_a_prompt(begin: int, end: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """What tokens from `begin` to `end` see of a row: [1, 1, new, all]."""
    if begin == 0:
        seen = attention_mask(None, end, window, device)
        return seen if seen is None else _added(seen, dtype)
    back = torch.arange(begin, end, device=device)[:, None] - torch.arange(end, device=device)[None, :]
    seen = back >= 0
    if window is not None:
        seen &= back < window
    return _added(seen[None, None], dtype)


def _of_one_each(
    rows: Tensor, at: Tensor, places: int, longest: int, window: int | None, dtype: torch.dtype
) -> Tensor | None:
    """What the token at `at` of each row sees: [places, 1, 1, all]."""
    if len(rows) == places and window is None and bool((at == longest - 1).all()):
        return None
    limit = torch.zeros(places, dtype=torch.int64, device=at.device)
    limit[rows] = at
    back = limit[:, None] - torch.arange(longest, device=at.device)
    seen = back >= 0
    if window is not None:
        seen &= back < window
    return _added(seen[:, None, None], dtype)


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """As what is added to scores, made once for all layers."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)
