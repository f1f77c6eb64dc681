"""A needle in a haystack: one number among many sentences, some of which tell other numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.evaluate.generated.dice import Dice
from shoal.evaluate.generated.kind import Kind, written

_WHO = ("baker", "captain", "gardener", "painter", "driver", "teacher", "clerk", "miller", "student", "carpenter")
_HOW = ("old", "tall", "quiet", "young", "careful", "tired", "cheerful", "patient", "busy", "clever")
_DOES = ("watches", "paints", "finds", "carries", "mends", "buys", "sells", "describes", "counts", "forgets")
_WHAT = ("boats", "baskets", "letters", "lanterns", "apples", "maps", "stones", "clocks", "ropes", "books")
_WHEN = ("in the morning", "at noon", "after the rain", "before dawn", "in winter", "on Sundays", "near the river")
_PLACES = (
    *("Lisbon", "Nairobi", "Bergen", "Santiago", "Osaka", "Dakar", "Tbilisi", "Havana", "Cork", "Medan"),
    *("Winnipeg", "Split", "Cusco", "Tampere", "Mombasa", "Adelaide"),
)
_OTHERS = 3


def _among(characters: int) -> Callable[[Dice], dict[str, Any]]:
    """The size of the haystack is one of letters: how many tokens those are depends on the tokenizer."""

    def item(dice: Dice) -> dict[str, Any]:
        hay: list[str] = []
        length = 0
        while length < characters:
            hay.append(f"The {dice.one(_HOW)} {dice.one(_WHO)} {dice.one(_DOES)} {dice.one(_WHAT)} {dice.one(_WHEN)}.")
            length += len(hay[-1]) + 1
        places = dice.some(_PLACES, 1 + _OTHERS)
        numbers = dice.some(range(10_000, 100_000), len(places))
        for place, number in zip(places[1:], numbers[1:], strict=True):
            hay.insert(dice.below(len(hay) + 1), f"The number of {place} is {number}.")
        at = dice.below(len(hay) + 1)
        hay.insert(at, f"The number of {places[0]} is {numbers[0]}.")
        asked = f"\n\nWhat is the number of {places[0]}? The number of {places[0]} is"
        depth = round(at / (len(hay) - 1), 3)
        return {"text": " ".join(hay) + asked, "target": str(numbers[0]), "depth": depth}

    return item


def needle(characters: int) -> Kind:
    about = f"a number told once in about {characters:,} letters of other sentences"
    return Kind(1, about, _among(characters), written(8, r"(\d+)", stops=("\n", ".")))
