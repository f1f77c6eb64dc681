"""What a person reads: a line as each part ends, and a table in the end."""

from __future__ import annotations

from collections.abc import Callable

from shoal.bench.collectives import OPERATIONS, bus_gbs
from shoal.bench.products import best
from shoal.plan.hardware_types import Device, Measured, Row

_NAMES = {"launch_us": "launch"}


def line(part: str, measured: Measured, why: str) -> str:
    told = f"not measured: {why}" if why else _FOUND[part](measured) or "nothing to measure"
    return f"{_NAMES.get(part, part):<12} {told}"


def table(measured: Measured, known: Device | None) -> str:
    printed = known.peak if known else {}
    rows = [("precision", "best product (m x n x k)", "TFLOP/s", "of the peak on paper")]
    for precision, (m, n, k, _, rate) in sorted(best(measured.matmul).items(), key=lambda item: -item[1][4]):
        peak = printed.get(precision.split()[0])
        share = f"{rate / peak:.0%} of {peak:g}" if peak else "-"
        rows.append((precision, f"{m} x {n} x {k}", f"{rate:g}", share))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    memory = _memory(measured)
    if known is not None and measured.memory:
        memory += f" ({max(measured.memory)[1] / known.bandwidth_tbs / 1e3:.0%} of the bandwidth on paper)"
    found = {
        "attention": _attention(measured),
        "memory": memory,
        "norm": _norm(measured),
        "launch": _launch(measured),
        "collectives": _collectives(measured),
        "disk": _disk(measured),
    }
    return "\n".join([*lines, "", *(f"{name:<12} {told}" for name, told in found.items() if told)])


def _matmul(measured: Measured) -> str:
    return f"{len(measured.matmul)} products; the best: " + ", ".join(
        f"{precision} {row[4]:g} TFLOP/s" for precision, row in best(measured.matmul).items()
    )


def _attention(measured: Measured) -> str:
    if not measured.attention:
        return ""
    batch, heads, kv_heads, seq, head_dim, precision, forward, backward = max(measured.attention, key=lambda r: r[6])
    of = f"{batch} x {seq} tokens, {heads} heads ({kv_heads} of keys) of {head_dim}"
    return f"{precision} forwards {forward:g}, backwards {backward:g} TFLOP/s ({of})"


def _memory(measured: Measured) -> str:
    return f"{max(measured.memory)[1]:g} GB/s read and written by a large copy" if measured.memory else ""


def _norm(measured: Measured) -> str:
    return f"{max(measured.norm)[1]:g} GB/s read and written by an RMSNorm" if measured.norm else ""


def _launch(measured: Measured) -> str:
    return f"{measured.launch_us:g} µs a kernel" if measured.launch_us else ""


def _collectives(measured: Measured) -> str:
    if not measured.collectives:
        return ""

    def largest(operation: str) -> Row:
        return max((row for row in measured.collectives if row[0] == operation), key=lambda row: row[2])

    rates = ", ".join(f"{operation} {bus_gbs(largest(operation)):.3g}" for operation in OPERATIONS)
    first = largest(OPERATIONS[0])
    return f"{first[1]} ranks, {_size(first[2])}: {rates} GB/s a rank"


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >> 20 else f"{count >> 10} KiB"


def _disk(measured: Measured) -> str:
    return ", ".join(f"{way} {rate:g} GB/s" for way, rate in measured.disk)


_FOUND: dict[str, Callable[[Measured], str]] = {
    "collectives": _collectives,
    "matmul": _matmul,
    "attention": _attention,
    "memory": _memory,
    "norm": _norm,
    "launch_us": _launch,
    "disk": _disk,
}
