"""How much an operator has to do at least, from the shapes in the trace: operations, and bytes to and from memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal.profile.trace import Event

_BYTES = {
    "double": 8, "long": 8, "long int": 8, "float": 4, "int": 4, "c10::bfloat16": 2, "c10::half": 2, "short": 2,
    "unsigned char": 1, "signed char": 1, "char": 1, "bool": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1,
    "tensorlist": 4, "generic list": 4,
}  # fmt: skip
_PRECISIONS = {
    "c10::bfloat16": "bf16", "c10::half": "fp16", "float": "fp32", "double": "fp32", "c10::float8_e4m3fn": "fp8",
    "c10::float8_e5m2": "fp8",
}  # fmt: skip
_KNOWN = ("aten::", "triton_", "triton::", "fsdp::")  # of others nobody knows what they do with their inputs
_CAUSAL = 0.5  # of the square

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Work:
    flops: float
    bytes: float
    precision: str


def shapes(operator: Event) -> list[tuple[Dims, str]]:
    """Of all tensors among the inputs, those in lists too: (dimensions, type)."""
    dims, types = operator.args.get("Input Dims") or [], operator.args.get("Input type") or []
    return list(_tensors(dims, types))


def _tensors(dims: list[Any], types: list[Any]) -> Iterator[tuple[Dims, str]]:
    for i, one in enumerate(dims):
        if not isinstance(one, list) or not one:
            continue
        type_ = str(types[i]) if i < len(types) else ""
        if isinstance(one[0], list):
            yield from ((tuple(map(int, inner)), type_) for inner in one)
        elif type_.lower() not in ("", "scalar", "scalarlist"):
            yield tuple(map(int, one)), type_


def work(operator: Event, attended: float | None = None) -> Work | None:
    """None where the trace does not say enough. `attended`: of attention's square, what packed documents left to
    compute in the traced steps, where the kernel skips the rest of it."""
    inputs = shapes(operator)
    if not inputs or not operator.name.startswith(_KNOWN):
        return None
    name = operator.name.removeprefix("aten::").removesuffix("_out")
    precision = next((_PRECISIONS[t.lower()] for _, t in inputs if t.lower() in _PRECISIONS), "fp32")
    matrices = [dims for dims, _ in inputs if len(dims) >= 2]
    moved = sum(_size(dims, type_) for dims, type_ in inputs)
    widest = max(_size(dims, type_) for dims, type_ in inputs)
    for pattern, count in _COUNTED:
        if pattern.search(name):
            counted = count(matrices, name)
            if counted is None:
                return None
            flops, result = counted
            if count is _attention and attended is not None and "flex" in name:
                flops *= attended / _CAUSAL
            return Work(flops, moved + result * _width(inputs[0][1]), precision)
    if "adam" in name:  # parameters, gradients and two moments are read, all but the gradients written
        return Work(0.0, moved * 7 / 4, precision)
    if name.startswith("triton::"):  # by hand: results are among the arguments, logits become their own gradient
        return Work(0.0, moved * (2 if "cross_entropy" in name else 1), precision)
    if _ONE_WAY.search(name):
        return Work(0.0, moved, precision)
    if name.startswith("_foreach"):
        return Work(0.0, 2 * moved, precision)
    if name.endswith("_"):  # in place: what it changes is an input
        return Work(0.0, moved + _size(*inputs[0]), precision)
    return Work(0.0, moved + widest, precision)


def _product(matrices: list[Dims], name: str) -> tuple[float, float] | None:
    """(operations, elements of the result). What it adds to comes before the two matrices, what it fills after them."""
    pair = next((p for p in (matrices[1:3], matrices[:2]) if len(p) == 2 and p[0][-1] == p[1][-2]), None)
    if pair is None:
        return None
    a, b = pair
    batch = math.prod(a[:-2])
    return 2.0 * batch * a[-2] * a[-1] * b[-1], float(batch * a[-2] * b[-1])


def _moved(matrices: list[Dims], name: str) -> tuple[float, float] | None:
    """A fused kernel's results are among its arguments."""
    return 0.0, 0.0


def _first_two(matrices: list[Dims], name: str) -> tuple[float, float] | None:
    return _product(matrices[:2], name)  # scales, or where the result goes, come after


def _grouped(matrices: list[Dims], name: str) -> tuple[float, float] | None:
    """Rows of the first are dealt out to the groups of the second, or groups of columns give one product each."""
    if len(matrices) < 2:
        return None
    a, b = matrices[:2]
    result = a[-2] * b[-1] * (b[0] if len(a) == 2 and len(b) == 2 else 1)
    return 2.0 * math.prod(a) * b[-1], float(result)


def _attention(matrices: list[Dims], name: str) -> tuple[float, float] | None:
    """[batch, heads, seq, head_dim], or the middle two the other way; backwards five products instead of two."""
    four = [dims for dims in matrices if len(dims) == 4]
    if len(four) < 3:
        return None
    seq, heads = (1, 2) if re.match(r"_(flash|efficient)_attention", name) else (2, 1)
    query, key = max(four, key=math.prod), min(four[:4], key=math.prod)  # keys may have fewer heads, and come early
    products = 5 if "backward" in name else 2
    square = query[0] * query[heads] * query[seq] * key[seq] * query[3]
    return products * 2.0 * square * _CAUSAL, float(math.prod(query))


_COUNTED: tuple[tuple[re.Pattern[str], Callable[[list[Dims], str], tuple[float, float] | None]], ...] = (
    (re.compile(r"^triton_(?!tem)"), _moved),
    (re.compile(r"scaled_dot_product|flash_attention|efficient_attention|cudnn_attention|flex_attention"), _attention),
    (re.compile(r"^_?scaled_mm|^triton_tem"), _first_two),
    (re.compile(r"grouped_mm"), _grouped),
    (re.compile(r"^b?mm$"), _first_two),
    (re.compile(r"^(addmm|baddbmm)_?$"), _product),
)
# They leave next to nothing behind, or read next to nothing.
_ONE_WAY = re.compile(
    r"^(sum|mean|norm|amax|linalg_vector_norm|_foreach_norm|fill_|zero_|_local_scalar_dense|zeros_like)"
)


def _size(dims: Dims, type_: str) -> float:
    return float(math.prod(dims) * _width(type_))


def _width(type_: str) -> int:
    return _BYTES.get(type_.lower(), 4)
