"""The engine's kernels against what torch computes, as tests.kernels.compare."""

from __future__ import annotations

import sys
import traceback
from itertools import product as every

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.generate.asked import row_asked
from shoal.kernels import decode_pick
from shoal.kernels.decode_products import Norm, Weight, plain, product
from shoal.kernels.paged_decode import Pages, Turn, attend_one, room
from shoal.kernels.paged_prefill import attend_pages, attend_rows

GPU = torch.cuda.is_available()
PAGE = 16
HALF = torch.bfloat16 if GPU else torch.float16  # interpreted, products of bfloat16 are those of its bits


def close(found: Tensor, wanted: Tensor) -> None:
    """By the whole of it: of 16 bits a single number may be one step off."""
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    off = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert off < (2e-5 if found.dtype == torch.float32 else 1e-2), float(off)


def products() -> None:
    for dtype, (rows, width) in every((torch.float32, HALF), ((64, 128), (50, 72), (20, 1300))):
        x, w = torch.randn(1, width).to(dtype), (torch.randn(2 * rows, width) / width**0.5).to(dtype)
        norm = Norm(torch.rand(width).to(dtype), 1e-5)
        centred = Norm(torch.rand(width).to(dtype), 1e-6, centred=True)
        bias, residual = torch.randn(2 * rows).to(dtype), torch.randn(1, 2 * rows).to(dtype)
        factors = torch.rand(2 * rows) / 50
        eight = Weight(torch.randint(-127, 128, w.shape).to(torch.int8), None, factors)
        for weight, settings in (
            (Weight(w), {}),
            (Weight(w, bias), {"norm": norm}),
            (Weight(w), {"norm": centred, "residual": residual}),
            (Weight(w), {"norm": norm, "act": "silu"}),
            (Weight(w, bias), {"act": "gelu_tanh"}),
            (eight, {"norm": norm, "residual": residual}),
            (eight, {"norm": norm, "act": "silu"}),
        ):
            close(product(x, weight, **settings), plain(x, weight, **settings))  # type: ignore[arg-type]


def _pages(blocks: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Pages:
    shape = (blocks, kv_heads, PAGE, dim)
    return Pages(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))


def _of(pages: Pages, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one text, [key heads, length, dim]."""
    at = torch.arange(length)
    blocks, within = table[at // PAGE].long(), at % PAGE
    return pages.keys[blocks, :, within].transpose(0, 1), pages.values[blocks, :, within].transpose(0, 1)


def _attended(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """q [new, heads, dim], the last ones of a text, over k and v [key heads, all, dim], in float32."""
    groups = q.shape[1] // k.shape[0]
    k, v = (t.float().repeat_interleave(groups, 0) for t in (k, v))
    back = torch.arange(k.shape[1] - q.shape[0], k.shape[1])[:, None] - torch.arange(k.shape[1])
    seen = (back >= 0) & (back < (window or k.shape[1]))
    return F.scaled_dot_product_attention(q.float().transpose(0, 1) * scale, k, v, attn_mask=seen).transpose(0, 1)


def _turned(x: Tensor, norm: Tensor | None, turn: Turn, at: int) -> Tensor:
    """[heads, dim], in float32."""
    x, half = x.float(), turn.cos.shape[1]
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], norm.float() + turn.centred, turn.eps)
    a, b, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    c, s = turn.cos[at], turn.sin[at]
    return torch.cat((a * c - b * s, b * c + a * s, rest), -1)


def one_token() -> None:
    cases = (
        # head_dim, turned, groups, key heads, window, norms, programs
        (64, 64, 4, 2, None, "", 1),
        (128, 128, 1, 1, None, "plain", 8),
        (80, 80, 3, 1, 40, "", 8),
        (96, 48, 2, 1, None, "", 8),
        (192, 192, 1, 2, 100, "", 1),
        (256, 256, 2, 1, None, "centred", 32),
    )
    for (dim, rotary, groups, kv_heads, window, norms, programs), dtype in every(cases, (torch.float32, HALF)):
        positions = torch.tensor([0, 37, -1, 299], dtype=torch.int32)
        tables = torch.randperm(4 * 20)[: 4 * 19].view(4, 19).to(torch.int32)
        pages = _pages(80, kv_heads, dim, dtype)
        angles = torch.rand(320, rotary // 2) * 6
        weights = [torch.rand(dim).to(dtype) if norms else None for _ in range(2)]
        turn = Turn(angles.cos(), angles.sin(), weights[0], weights[1], 1e-6, norms == "centred")
        heads = groups * kv_heads
        joined = torch.randn(4, (heads + 2 * kv_heads) * dim).to(dtype)
        q, k, v = (t.unflatten(-1, (-1, dim)) for t in joined.split((heads * dim, kv_heads * dim, kv_heads * dim), -1))
        parts = room(4, kv_heads, groups, dim, joined.device, programs * 4 * kv_heads)
        found = attend_one(q, k, v, pages, tables, positions, parts, 1.3, window, turn)
        assert not parts.counters.any()
        for row, at in enumerate(positions.tolist()):
            if at < 0:
                continue
            keys, values = _of(pages, tables[row], at + 1)
            close(keys[:, at], _turned(k[row], weights[1], turn, at).to(dtype))
            assert torch.equal(values[:, at], v[row])
            close(
                found[row : row + 1],
                _attended(_turned(q[row], weights[0], turn, at)[None], keys, values, 1.3, window).to(dtype),
            )
        q, k = q.contiguous(), k.contiguous()
        found = attend_one(q, k, v, pages, tables, positions, parts, window=window)
        keys, values = _of(pages, tables[3], 300)
        assert torch.equal(keys[:, 299], k[3])
        close(found[3:], _attended(q[3:], keys, values, 1.0, window).to(dtype))


def many_tokens() -> None:
    cases = ((64, 3, 2, None), (80, 1, 1, 20), (128, 4, 1, 100), (192, 1, 1, None), (256, 2, 1, None))
    for (dim, groups, kv_heads, window), dtype in every(cases, (torch.float32, HALF)):
        pages = _pages(40, kv_heads, dim, dtype)
        tables = torch.randperm(40).view(2, 20).to(torch.int32)
        new, before = [70, 5], [0, 130]
        begins = torch.tensor([0, 70, 75], dtype=torch.int32)
        q = torch.randn(75, groups * kv_heads, dim).to(dtype)
        found = attend_pages(q, pages, tables, begins, torch.tensor(before, dtype=torch.int32), 70, 0.7, window)
        for i in range(2):
            keys, values = _of(pages, tables[i], before[i] + new[i])
            part = slice(int(begins[i]), int(begins[i + 1]))
            close(found[part], _attended(q[part], keys, values, 0.7, window).to(dtype))
        # The same text in rows, in pages, whole and by single tokens: to the bit.
        k, v = (t.transpose(0, 1).contiguous() for t in _of(pages, tables[0], 70))
        rows = attend_rows(q[:70], k, v, torch.tensor([0, 70], dtype=torch.int32), 70, 0.7, window)
        assert torch.equal(rows, found[:70])
        for at in (0, 69):
            alone = torch.tensor([0, 1], dtype=torch.int32)
            again = attend_pages(
                q[at : at + 1], pages, tables[:1], alone, torch.tensor([at], dtype=torch.int32), 1, 0.7, window
            )
            assert torch.equal(again, rows[at : at + 1])


def picks() -> None:
    """Those of the CPU, of the same logits and the same uniform numbers."""
    from shoal.generate.pick import Chooser
    from shoal.generate.pick import pick as on_cpu
    from shoal.generate.request import Sampling

    asked_for = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "seed": 5},
        {"top_k": 1},
        {"top_k": 40, "temperature": 1.5},
        {"top_p": 0.8, "temperature": 2.0},
        {"top_p": 0.3, "top_k": 100},
        {"top_p": 0.0},
        {"min_p": 0.1},
        {"min_p": 0.02, "top_p": 0.95, "top_k": 300, "temperature": 3.0},
    ]
    for dtype, (vocabulary, wide) in every((torch.float32, torch.bfloat16), ((900, 960), (5000, 5000))):
        logits = (torch.randn(len(asked_for), wide) * 3).to(dtype)
        logits[:, vocabulary:] = 50  # rows that mean nothing
        for draw in range(3):
            samplings = [Sampling(**{"seed": draw, **one}) for one in asked_for]  # type: ignore[arg-type]
            answers = [list(range(i)) for i in range(len(samplings))]
            choosers = [Chooser(s, vocabulary, answer=a) for s, a in zip(samplings, answers, strict=True)]
            wanted = on_cpu(logits.cpu(), choosers)
            asked = torch.zeros(len(samplings) + 1, decode_pick.COLUMNS, dtype=torch.float64)
            for i, sampling in enumerate(samplings):
                asked[i] = torch.tensor(row_asked(sampling, position=7, token=-1, seat=i, drawn=len(answers[i])))
            asked[-1, 0] = -1  # no row
            last = torch.full((len(samplings) + 1,), -5, dtype=torch.int32)
            told = decode_pick.pick(torch.cat((logits, logits[:1])), asked, last, vocabulary)
            found = told[:-1, 0].int().tolist()
            assert found == wanted, (draw, dtype, [*zip(found, wanted, asked_for, strict=True)])
            assert last.tolist() == [*wanted, -5]
            spread = logits.float().log_softmax(-1).gather(1, torch.tensor(wanted)[:, None])[:, 0]
            torch.testing.assert_close(told[:-1, 1].float(), spread, rtol=1e-4, atol=1e-4)
    logits[1, 3] = float("nan")
    assert decode_pick.pick(logits, asked[:-1], last, vocabulary)[1, 0] == -1
    embed = torch.randn(50, 1030)
    asked[:, decode_pick.TOKEN] = torch.arange(len(asked))
    asked[2, decode_pick.TOKEN] = -1
    asked[2, decode_pick.SEAT] = 4
    last[4] = 33
    x, positions = decode_pick.begin(asked, last, embed, 2.0)
    assert torch.equal(x[2], embed[33] * 2)
    assert torch.equal(x[3], embed[3] * 2)
    assert positions.tolist() == [7] * len(samplings) + [-1]


CHECKS = (picks, products, one_token, many_tokens)


def main() -> int:
    only = sys.argv[1:]
    torch.set_default_device("cuda" if GPU else "cpu")
    failed = []
    for check in [one for one in CHECKS if not only or one.__name__ in only]:
        torch.manual_seed(0)
        try:
            check()
        except Exception:
            failed.append(check.__name__)
            traceback.print_exc()
    print("equal" if not failed else f"differ: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
