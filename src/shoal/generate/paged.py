"""The trainer's decoder with keys and values in blocks, for a GPU: a `Runner`.

Memory is taken by the block, not by the longest text, and texts that begin alike share what they have in common
(`shoal.generate.blocks`). The model is computed by its own modules; only attention is put in the place of its seam, so
that every family that attends, mixtures of experts too, is served by the code that trains it. Where Triton's kernels
cannot be used there is a plain way beside them, which tests compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal import kernels
from shoal.errors import SetupError, UsageError
from shoal.generate.blocks import SIZE, Blocks, Held
from shoal.model.attention import Attention
from shoal.model.decoder import Decoder
from shoal.model.mla import LatentAttention

SHARE = 0.85  # of the memory that is free once the weights are there


@dataclass
class Seat:
    number: int
    held: Held
    length: int = 0  # tokens whose keys and values are there, or will be when what was asked for is done
    closed: bool = False

    @property
    def cached(self) -> int:
        return self.held.cached


@dataclass(frozen=True)
class Now:
    """What one forward pass is of."""

    tables: Tensor  # int32 [texts, blocks]
    positions: Tensor  # int32 [texts]: of the first new token of each
    begins: Tensor  # int32 [texts + 1]: where the new tokens of each begin among all
    longest: int  # new tokens of a text
    single: bool  # one new token each


class Paged:
    def __init__(
        self,
        model: Decoder,
        places: int,
        context: int,
        kv_bytes: int | None = None,
        exact: bool = False,
        reuse: bool = True,
    ) -> None:
        """`kv_bytes`: memory for keys and values; None takes what so many places of this context need, as far as it is
        free. `exact`: attention by one routine whatever comes beside it."""
        if why := unfit(model):
            raise UsageError(why)
        self.model, self.context, self.exact, self._places = model, context, exact, places
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.wide = -(-context // SIZE)  # blocks of a text at most
        mixers = [block.mixer for block in model.blocks.values()]
        attending = [mixer for mixer in mixers if isinstance(mixer, Attention | LatentAttention)]
        heads, width = sizes(model)
        each = 2 * len(attending) * heads * SIZE * width * self.dtype.itemsize
        count = places * self.wide
        room = kv_bytes if kv_bytes is not None else self._free_bytes()
        if room is not None:
            count = min(count, room // each)
        if count < self.wide:
            raise SetupError(
                f"{(room or 0) / 1e9:.2f} GB for keys and values are {count * SIZE:,} tokens, less than the context of "
                f"{context:,}: give more memory or a shorter context."
            )
        self.blocks = Blocks(count, SIZE, reuse)
        # One more than there are: nobody's rows write there. Zeros: what a mask hides is read all the same by the plain
        # way, and NaN times nothing is NaN.
        held = torch.zeros(len(attending), 2, count + 1, heads, SIZE, width, dtype=self.dtype, device=self.device)
        self.keys, self.values = [t[0] for t in held], [t[1] for t in held]
        self._numbers = list(range(places - 1, -1, -1))
        self._now: Now | None = None
        self._rooms: dict[int, object] = {}
        self._undo: list[Callable[[], None]] = []
        self._open(attending)

    def admit(self, tokens: Sequence[int], most: int, version: str) -> Seat | None:
        if not self._numbers:
            return None
        held = self.blocks.admit(tokens, most, version)
        if held is None:
            return None
        return Seat(self._numbers.pop(), held, held.cached)

    def release(self, seat: Seat) -> None:
        seat.closed = True
        self.blocks.release(seat.held)
        self._numbers.append(seat.number)

    @torch.no_grad()
    def prefill(self, seat: Seat, tokens: Sequence[int], every: bool) -> Tensor:
        begin, end = seat.length, seat.length + len(tokens)
        self.blocks.grow(seat.held, end)
        numbers = torch.tensor([*seat.held.blocks, begin, 0, len(tokens)], dtype=torch.int32).to(self.device)
        ids = torch.tensor([list(tokens)]).to(self.device)
        at = torch.arange(begin, end, device=self.device)[None]
        self._now = Now(numbers[None, :-3], numbers[-3:-2], numbers[-2:], len(tokens), False)
        hidden = self.model.hidden(ids, at)
        self._now = None
        seat.length = end
        self.blocks.wrote(seat.held, tokens)
        return self.logits(hidden[0] if every else hidden[0, -1:])

    @torch.no_grad()
    def decode(self, seats: Sequence[Seat], tokens: Sequence[int]) -> Tensor:
        for seat in seats:
            self.blocks.grow(seat.held, seat.length + 1)
        tables = torch.zeros(len(seats), max(len(seat.held.blocks) for seat in seats), dtype=torch.int32)
        for row, seat in zip(tables, seats, strict=True):
            row[: len(seat.held.blocks)] = torch.tensor(seat.held.blocks)
        at = torch.tensor([seat.length for seat in seats], dtype=torch.int32).to(self.device)
        ids = torch.tensor([[token] for token in tokens]).to(self.device)
        logits = self.step(ids, tables.to(self.device), at)
        for seat, token in zip(seats, tokens, strict=True):
            seat.length += 1
            self.blocks.wrote(seat.held, [token])
        return logits

    def step(self, ids: Tensor, tables: Tensor, at: Tensor) -> Tensor:
        """One token each [texts, 1] at the positions `at`, by the model's own modules: [texts, vocab]."""
        begins = torch.arange(len(ids) + 1, dtype=torch.int32, device=self.device)
        self._now = Now(tables, at, begins, 1, True)
        hidden = self.model.hidden(ids, at.clamp(min=0)[:, None].long())
        self._now = None
        return self.logits(hidden[:, 0])

    def logits(self, hidden: Tensor) -> Tensor:
        tied = self.model.embed.weight if self.model.shape.tie_embeddings else None
        return self.model.head(hidden[None], tied, None)[0]

    def forget(self) -> None:
        """Nothing of older weights is used again."""
        self.blocks.forget()

    def close(self) -> None:
        """The model as it was."""
        while self._undo:
            self._undo.pop()()

    def room(self, texts: int) -> object:
        """Where decode's programs leave their parts, one for each size of a batch."""
        from shoal.kernels.paged_decode import room

        if texts not in self._rooms:
            heads, width = sizes(self.model)
            self._rooms[texts] = room(texts, heads, self.model.shape.heads // heads, width, self.device)
        return self._rooms[texts]

    def _open(self, attending: Sequence[Attention | LatentAttention]) -> None:
        """The model's seams. Where no pass of this runner is under way they do what they did."""
        mask = self.model.mask
        self._undo.append(partial(setattr, self.model, "mask", mask))
        self.model.mask = lambda *asked: mask(*asked) if self._now is None else asked[2]  # the window
        for layer, attention in enumerate(attending):
            self._undo.append(partial(setattr, attention, "attend", attention.attend))
            attention.attend = partial(self._attend, layer, attention.attend)

    def _attend(
        self,
        layer: int,
        otherwise: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        groups: int,
    ) -> Tensor:
        """q [texts, 1, heads, width], or of one text [1, tokens, heads, width]; k and v of the same tokens."""
        now, keys, values = self._now, self.keys[layer], self.values[layer]
        if now is None:
            return otherwise(q, k, v, window, groups)
        new_q, new_k, new_v = (t.flatten(0, 1).contiguous() for t in (q, k, v))
        if not kernels.fit((new_q, new_k, new_v)):
            write(keys, values, new_k, new_v, now)
            return attend_plainly(new_q, keys, values, now, window).view(q.shape)
        from shoal.kernels.paged_decode import Pages, Room, attend_one
        from shoal.kernels.paged_prefill import attend_pages

        pages = Pages(keys, values)
        if now.single and not self.exact:
            room = self.room(len(new_q))
            assert isinstance(room, Room)
            y = attend_one(new_q, new_k, new_v, pages, now.tables, now.positions, room, window=window)
        else:
            write(keys, values, new_k, new_v, now)
            y = attend_pages(new_q, pages, now.tables, now.begins, now.positions, now.longest, window=window)
        return y.view(q.shape)

    def _free_bytes(self) -> int | None:
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.mem_get_info(self.device)[0] * SHARE)


def write(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, now: Now) -> None:
    """New keys and values [tokens, key heads, width] into their blocks; those of nobody into the last one."""
    if now.single:
        text = torch.arange(len(k), device=k.device)
        at = now.positions.long()
    else:
        text = torch.zeros(len(k), dtype=torch.int64, device=k.device)
        at = now.positions.long() + torch.arange(len(k), device=k.device)
    blocks, within = now.tables[text, at.clamp(min=0) // SIZE].long(), at.clamp(min=0) % SIZE
    blocks = torch.where(at < 0, len(keys) - 1, blocks)
    keys[blocks, :, within], values[blocks, :, within] = k, v


def attend_plainly(q: Tensor, keys: Tensor, values: Tensor, now: Now, window: int | None) -> Tensor:
    """q [tokens, heads, width] over blocks [blocks, key heads, SIZE, width]."""
    mixed = []
    for text in range(len(now.positions)):
        part = slice(text, text + 1) if now.single else slice(0, len(q))
        new = q[part].transpose(0, 1)[None]
        begin = int(now.positions[text])
        end = begin + new.shape[2]
        table = now.tables[text, : -(-end // SIZE)].long()
        k, v = (t[table].transpose(0, 1).flatten(1, 2)[None, :, :end] for t in (keys, values))
        back = torch.arange(begin, end, device=q.device)[:, None] - torch.arange(end, device=q.device)
        seen = back >= 0 if window is None else (back >= 0) & (back < window)
        groups = q.shape[1] // keys.shape[1]
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        mixed.append(F.scaled_dot_product_attention(new, k, v, attn_mask=seen)[0].transpose(0, 1))
    return torch.cat(mixed)


def unfit(model: Decoder) -> str | None:
    """Why it cannot be served from blocks; None where it can."""
    for block in model.blocks.values():
        if not isinstance(getattr(block, "mixer", None), Attention | LatentAttention):
            return "keys and values in blocks are for models whose layers all attend."
    return None


def sizes(model: Decoder) -> tuple[int, int]:
    """Key heads and width of what is kept of a token."""
    shape = model.shape
    return (shape.heads if shape.mla is not None else shape.kv_heads), shape.head_dim
