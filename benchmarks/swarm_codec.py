"""How fast a pseudo-gradient is made into a payload and added up again, on one core, and how small it gets.

    python benchmarks/swarm_codec.py [--params 33554432] [--turns 5]

Encoding includes error feedback and, for topk, entropy coding. Beside Shoal's codecs: the same choice of values made
with torch.topk and 12-bit indices (what Covenant-72B sends: 0.219 bits a parameter without its scales), and zstd of
bf16. Times are of the processor, not of the clock: the best of the turns on a machine that others may use too.
Updates are random: normal, with a scale of its own for every 65,536
parameters, so that the places of the largest are random too: clusters would make topk smaller.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from shoal.codec import NAMES, codec, warm

LEAST_GB_PER_S = 1.0
MOST_BITS = 0.16
COVENANT_BITS = 0.219  # 64 x (12 + 2) bits of 4,096, arXiv 2603.08163


@dataclass(frozen=True)
class Row:
    name: str
    bits: float
    encode_gb_per_s: float
    add_gb_per_s: float | None

    def line(self) -> str:
        add = "-" if self.add_gb_per_s is None else f"{self.add_gb_per_s:.2f}"
        return f"{self.name:<26} {self.bits:>12.4f} {32 / self.bits:>9.1f} {self.encode_gb_per_s:>12.2f} {add:>9}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=1 << 25)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    update = _update(args.params)
    print(f"{args.params:,} parameters, float32, one core, best of {args.turns}")
    print(f"{'codec':<26} {'bits/param':>12} {'x fp32':>9} {'encode GB/s':>12} {'add GB/s':>9}")
    ours = [_row(name, update, args.turns) for name in NAMES]
    for row in (*ours, *_peers(update)):
        print(row.line())
    beside = _beside(update)
    checks = [(f"{r.name} encodes {LEAST_GB_PER_S:g} GB/s a core", r.encode_gb_per_s >= LEAST_GB_PER_S) for r in ours]
    checks += [(f"{r.name} adds {LEAST_GB_PER_S:g} GB/s a core", (r.add_gb_per_s or 0) >= LEAST_GB_PER_S) for r in ours]
    checks.append((f"topk: at most {MOST_BITS} bits a parameter, all included", ours[-1].bits <= MOST_BITS))
    checks.append(
        (f"topk: less than the {COVENANT_BITS} of Covenant-72B without scales", ours[-1].bits < COVENANT_BITS)
    )
    checks.append((f"Python goes on beside it (longest standstill {beside * 1e3:.0f} ms)", beside < 0.1))
    for claim, held in checks:
        print(f"{'PASS' if held else 'MISS'}  {claim}")
    return 0 if all(held for _, held in checks) else 1


def _update(count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    scale = np.repeat((10.0 ** rng.uniform(-6, -3, -(-count // 65536))).astype(np.float32), 65536)[:count]
    return rng.standard_normal(count, np.float32) * scale


def _row(name: str, update: np.ndarray, turns: int) -> Row:
    c = codec(name)
    warm(c)
    residual, total = np.zeros_like(update), np.zeros_like(update)
    payload = c.encode(update, residual, 0.95)
    encode_s = _best(lambda: c.encode(update, residual, 0.95), turns)
    add_s = _best(lambda: c.add(payload, total, 0.125), turns)
    return Row(name, 8 * len(payload) / len(update), update.nbytes / encode_s / 1e9, update.nbytes / add_s / 1e9)


def _peers(update: np.ndarray) -> Iterator[Row]:
    import torch

    torch.set_num_threads(1)
    part = torch.from_numpy(update[: min(len(update), 1 << 23) // 4096 * 4096])
    residual = torch.zeros_like(part)
    held = [b""]

    def with_torch() -> None:
        held[0] = _torch_topk(part, residual)

    seconds = _best(with_torch, 2)
    yield Row("torch.topk, 12-bit indices", 8 * len(held[0]) / len(part), 4 * len(part) / seconds / 1e9, None)
    try:
        import zstandard
    except ImportError:
        return
    halves = (part.numpy().view(np.uint32) >> 16).astype(np.uint16)

    def with_zstd() -> None:
        held[0] = zstandard.ZstdCompressor(level=1).compress(halves.tobytes())

    seconds = _best(with_zstd, 2)
    yield Row("zstd -1 of bf16", 8 * len(held[0]) / len(part), 4 * len(part) / seconds / 1e9, None)


def _torch_topk(part, residual) -> bytes:  # type: ignore[no-untyped-def]  # torch is imported late
    """64 of 4,096 with feedback: sorted indices of 12 bits, 2 bits a value, two scales of 16 bits a chunk."""
    v = part.add(residual, alpha=0.95).view(-1, 4096)
    index = v.abs().topk(64, dim=1, sorted=False).indices.sort(dim=1).values
    value = v.gather(1, index)
    size = value.abs()
    above = size > size.mean(1, keepdim=True)
    high = (size * above).sum(1) / above.sum(1).clamp(min=1)
    low = (size * ~above).sum(1) / (~above).sum(1).clamp(min=1)
    sent = value.sign() * high[:, None].where(above, low[:, None])
    v.scatter_add_(1, index, -sent)
    residual.copy_(v.view(-1))
    pairs = index.numpy().astype(np.uint32).reshape(-1, 2)
    word = pairs[:, 0] | (pairs[:, 1] << 12)
    packed = np.stack([word & 255, (word >> 8) & 255, word >> 16], 1).astype(np.uint8)
    code = (value < 0).numpy().astype(np.uint8) | (above.numpy().astype(np.uint8) << 1)
    four = code.reshape(-1, 4)
    codes = four[:, 0] | (four[:, 1] << 2) | (four[:, 2] << 4) | (four[:, 3] << 6)
    scales = np.stack([high.numpy(), low.numpy()]).astype(np.float16)
    return packed.tobytes() + codes.tobytes() + scales.tobytes()


def _beside(update: np.ndarray) -> float:
    """The longest that another thread of Python stands still while topk encodes."""
    c, residual = codec("topk"), np.zeros_like(update)
    thread = threading.Thread(target=lambda: [c.encode(update, residual, 0.95) for _ in range(3)])
    thread.start()
    longest, last = 0.0, time.perf_counter()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


def _best(work: Callable[[], object], turns: int) -> float:
    """Seconds of this thread's processor."""
    times = []
    for _ in range(turns):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times)


if __name__ == "__main__":
    raise SystemExit(main())
