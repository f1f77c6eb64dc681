"""Every kernel against its plain twin. Without a GPU TRITON_INTERPRET=1 must be set before triton is imported."""

from __future__ import annotations

import sys
import traceback
from unittest.mock import patch

import torch

from shoal import kernels
from shoal.kernels import adamw
from shoal.kernels.adamw import Row, adamw_, adamw_all_
from shoal.kernels.cast import cast_joined
from shoal.kernels.cast_rows import cast_joined_by_rows, largest_joined
from shoal.kernels.cross_entropy import cross_entropy_, cross_entropy_8
from shoal.kernels.rounding import Spot
from shoal.model import fp8_rows
from shoal.model.head import cross_entropy
from shoal.train import adamw as plain

VOCAB = 700  # no power of two
GPU = torch.cuda.is_available()
EVEN = (256, 384) if GPU else (128, 256)  # whole tiles, rows that wide loads fit: other code than for odd sizes


def losses() -> None:
    logits, targets = torch.randn(9, VOCAB) * 3, torch.randint(0, VOCAB, (9,))
    targets[3] = -100
    kernels.allow(False)
    plain, slope = cross_entropy(logits.clone(), targets, wants_slope=True)
    torch.testing.assert_close(cross_entropy_(logits.clone(), targets, slopes=False), plain)
    taken = logits.clone()
    torch.testing.assert_close(cross_entropy_(taken, targets, slopes=True), plain)
    torch.testing.assert_close(taken, slope)
    assert not taken[3].any()
    plain, slope = cross_entropy(logits.clone(), targets, wants_slope=True, z_loss=0.02)
    taken = logits.clone()
    torch.testing.assert_close(cross_entropy_(taken, targets, slopes=True, z_loss=0.02), plain)
    torch.testing.assert_close(taken, slope)


def losses_in_8_bits() -> None:
    for rows, vocab, apart in ((150, VOCAB, 20), (*EVEN, 0)):
        for dtype in (torch.float32, torch.bfloat16):
            logits, targets = (torch.randn(rows, vocab) * 3).to(dtype), torch.randint(0, vocab, (rows,))
            targets[3] = -100
            kernels.allow(False)
            plain, slope = cross_entropy(logits.float(), targets, wants_slope=True)
            assert slope is not None
            wide = torch.full((vocab, rows + 2 * apart), 7.0).to(torch.float8_e5m2)
            turned = wide[:, apart : apart + rows]
            taken, slopes = cross_entropy_8(logits, targets, 2.0**15, torch.float8_e5m2, turned)
            torch.testing.assert_close(taken, plain)
            # Two digits; interpreted, rounding up to the next power of two goes to the last one.
            torch.testing.assert_close(slopes.float() / 2**15, slope, rtol=0.126 if GPU else 0.51, atol=1e-9)
            assert torch.equal(turned.float(), slopes.float().t())
            assert (wide[:, :apart].float() == 7).all()
            assert not slopes[3].float().any()


def updates() -> None:
    p, grad = torch.randn(5000), torch.randn(5000)
    parameter = torch.nn.Parameter(p.clone())
    about = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([parameter], **about)
    m, v, factor = torch.zeros_like(p), torch.zeros_like(p), torch.tensor(0.3)
    for step in (1, 2, 3):
        parameter.grad = grad * step * factor
        optimizer.step()
        adamw_(p, grad * step, m, v, factor, step=step, **about)
    torch.testing.assert_close(p, parameter.detach())
    torch.testing.assert_close(v, optimizer.state[parameter]["exp_avg_sq"])
    before = [t.clone() for t in (p, m, v)]
    adamw_(p, grad * torch.inf, m, v, torch.tensor(torch.nan), step=4, **about)
    assert all(torch.equal(*pair) for pair in zip(before, (p, m, v), strict=True)), "a step that is not taken"


def updates_of_many() -> None:
    """One launch gives the same bits as one for each; those that cannot be in it are updated too."""
    about = {"step": 2, "lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    rows: list[Row] = []
    spots = [Spot.of(7, str(i), (90, 100), (slice(3, 80), slice(20, 50))) for i in range(6)]
    for size, moments in ((5000, torch.float32), (1, torch.float32), (4096, torch.bfloat16), (9000, torch.bfloat16)):
        p, grad = torch.randn(size), torch.randn(size)
        rows.append((p, grad, torch.randn(size).to(moments), torch.rand(size).to(moments)))
    rows.append(tuple(torch.rand(301)[1:] for _ in range(4)))  # type: ignore[arg-type]  # four; on no even address
    rows.append((torch.empty(0),) * 4)
    alone = [[t.clone() for t in row] for row in rows]
    for (p, grad, m, v), spot in zip(alone[:-1], spots, strict=False):
        adamw_(p, grad, m, v, torch.tensor(0.3), spot, **about)
    with patch.object(adamw, "_in_one_launch", wraps=adamw._in_one_launch) as launched:
        adamw_all_(rows, torch.tensor(0.3), spots, **about)
    assert sorted(len(call.args[0]) for call in launched.call_args_list) == [1, 1, 2]
    assert all(torch.equal(*pair) for row in zip(rows, alone, strict=True) for pair in zip(*row, strict=True))
    adamw_all_(rows, torch.tensor(torch.nan), spots, **about)
    assert all(torch.equal(*pair) for row in zip(rows, alone, strict=True) for pair in zip(*row, strict=True))


def updates_in_16_bits() -> None:
    """Rounded at random, by kernel and twin alike: where the moments before rounding are the same, every bit is. (A
    gradient of nothing and betas of 0.75 are exact in float32, and are not in 16 bits.)"""
    about = {"lr": 3e-3, "betas": (0.75, 0.75), "eps": 1e-8, "weight_decay": 0.1}
    wholes = [(9000,), (90, 100), (6, 90, 100), (1 << 20, 1 << 13)]
    boxes = [(slice(0, 9000),), (slice(0, 90), slice(3, 70)), (slice(1, 4), slice(7, 60), slice(5, 95))]
    boxes.append((slice(600_000, 600_030), slice(0, 300)))  # places above 2**32
    rows, twins, spots = [], [], []
    for shape, box in zip(wholes, boxes, strict=True):
        p = torch.randn([s.stop - s.start for s in box])
        m, v = torch.randn_like(p).bfloat16(), torch.rand_like(p).bfloat16()
        rows.append((p, torch.zeros_like(p), m, v))
        twins.append(tuple(t.clone() for t in rows[-1]))
        spots.append(Spot.of(1, "x", shape, box))
    for step in (1, 2, 3):
        before = [row[3].clone() for row in rows]
        adamw_all_(rows, torch.tensor(0.3), spots, step=step, **about)
        plain.adamw_all_(twins, torch.tensor(0.3), spots, step=step, **about)
        for row, twin, old in zip(rows, twins, before, strict=True):
            assert torch.equal(row[2], twin[2])
            assert torch.equal(row[3], twin[3])
            assert not torch.equal(row[3], (old.float() * 0.75).bfloat16()), "rounded to the nearest"


def casts() -> None:
    for shape in ((200, 300), EVEN):
        for of in (torch.bfloat16, torch.float32):
            whole = (torch.randn(shape) * 100).to(of)
            if not GPU:
                whole = torch.randint(-4, 5, shape).to(of)  # exact in 8 bits: interpreted, rounding is wrong
            _cast_as_its_twin(whole)


def _cast_as_its_twin(whole: torch.Tensor) -> None:
    for pieces, dtype, along in (
        ([whole], torch.float8_e4m3fn, 0),
        ([whole, whole], torch.float8_e5m2, 1),
        ([whole[:, 20:150], whole[:, :33], whole[:, 100:]], torch.float8_e5m2, 1),
        ([whole[20:150], whole[:33].t().contiguous().t()], torch.float8_e4m3fn, 0),
    ):
        scales = [torch.tensor(2.0**i) for i in range(len(pieces))]
        most = torch.finfo(dtype).max
        joined, transposed = cast_joined(pieces, scales, dtype, along)
        wanted = torch.cat([(x.float() * s).clamp(-most, most) for x, s in zip(pieces, scales, strict=True)], along)
        assert torch.equal(joined.float(), wanted.to(dtype).float())
        assert torch.equal(transposed.float(), joined.float().t())


def casts_by_rows() -> None:
    for shape in ((200, 300), EVEN):
        whole = torch.randn(shape, dtype=torch.bfloat16) * torch.logspace(-6, 3, shape[0]).to(torch.bfloat16)[:, None]
        whole[7], whole[:, 25] = 0, 0
        small = torch.randint(-4, 5, shape).to(torch.bfloat16)  # exact in 8 bits: interpreted, rounding is wrong
        for x in (whole, small):
            for pieces, along in (
                ([x], 0),
                ([x.float()], 0),
                ([x[:, 20:150], x[:, :33], x[:, 100:]], 1),
                ([x[20:150], x[:33].t().contiguous().t()], 0),
            ):
                largest = largest_joined(pieces, along)
                assert all(map(torch.equal, largest, fp8_rows._largest(pieces, along)))
                if x is whole and not GPU:
                    continue
                scales = [fp8_rows.MOST / most.clamp(min=fp8_rows.TINY) for most in largest]
                if x is small:
                    scales = [2.0 ** (torch.arange(len(most)) % 6) for most in largest]
                taken = cast_joined_by_rows(pieces, *scales, fp8_rows.FORWARD, along)
                for a, b in zip(taken, fp8_rows._narrow(pieces, *scales, along), strict=True):
                    assert a.is_contiguous()
                    assert torch.equal(a.float(), b.float())
    whole[3, 5], whole[20, 250] = float("nan"), float("inf")
    rows, columns = largest_joined([whole], 0)
    assert (~rows.isfinite()).nonzero().flatten().tolist() == [3, 20]
    assert (~columns.isfinite()).nonzero().flatten().tolist() == [5, 250]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_device("cuda" if GPU else "cpu")
    told = []
    for check in (losses, losses_in_8_bits, updates, updates_of_many, updates_in_16_bits, casts, casts_by_rows):
        try:
            check()
        except AssertionError as e:
            traceback.print_exc()
            told.append(f"{check.__name__}: {str(e).strip().splitlines()[0] if str(e) else 'differs'}")
    print("\n".join(told) or "equal")
    sys.exit(bool(told))
