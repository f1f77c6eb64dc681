"""Every kernel against its plain twin. Without a GPU TRITON_INTERPRET=1 must be set before triton is imported."""

from __future__ import annotations

import torch

from shoal import kernels
from shoal.kernels.adamw import adamw_
from shoal.kernels.cast import cast_both
from shoal.kernels.cross_entropy import cross_entropy_
from shoal.model.head import cross_entropy

VOCAB = 700  # no power of two
GPU = torch.cuda.is_available()


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


def casts() -> None:
    whole = torch.randn(200, 300, dtype=torch.bfloat16) * 100
    if not GPU:
        whole = torch.randint(-4, 5, whole.shape).to(torch.bfloat16)  # exact in 8 bits: interpreted, rounding is wrong
    for x, dtype in ((whole, torch.float8_e4m3fn), (whole[:, 20:150], torch.float8_e5m2)):
        scale = torch.tensor(2.0)
        most = torch.finfo(dtype).max
        cast, transposed = cast_both(x, scale, dtype)
        wanted = (x.float() * scale).clamp(-most, most).to(dtype)
        assert torch.equal(cast.float(), wanted.float())
        assert torch.equal(transposed.float(), wanted.float().t())


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_device("cuda" if GPU else "cpu")
    losses()
    updates()
    casts()
    print("equal")
