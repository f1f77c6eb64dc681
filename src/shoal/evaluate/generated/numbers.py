"""Arithmetic and sorting: whole numbers, written as people write them."""

from __future__ import annotations

from typing import Any

from shoal.evaluate.generated.dice import Dice
from shoal.evaluate.generated.kind import Kind, with_examples, written


def _sum(dice: Dice) -> dict[str, Any]:
    sign, digits = dice.one("+-*"), dice.between(1, 3)
    a, b = dice.below(10**digits), dice.below(10 if dice.below(2) or sign == "*" else 10**digits)
    if sign == "-" and a < b:
        a, b = b, a
    result = a + b if sign == "+" else a - b if sign == "-" else a * b
    return {"text": f"{a} {sign} {b} =", "target": str(result), "digits": digits}


def _sorted(dice: Dice) -> dict[str, Any]:
    found = dice.some(range(100), dice.between(3, 7))
    return {
        "text": f"Sort these numbers: {' '.join(map(str, found))}\nSorted:",
        "target": " ".join(map(str, sorted(found))),
    }


ARITHMETIC = Kind(
    1, "sums, differences and products of numbers below 1,000", _sum, with_examples(written(8, r"(-?\d+)"), 4)
)
SORTING = Kind(1, "three to seven numbers, smallest first", _sorted, with_examples(written(32, r"(\d+(?: \d+)*)"), 3))
