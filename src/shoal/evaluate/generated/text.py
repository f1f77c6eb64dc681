"""Copying letters, closing brackets, and writing what a sentence says as JSON."""

from __future__ import annotations

import json
from typing import Any

from shoal.evaluate.generated.dice import Dice
from shoal.evaluate.generated.kind import Kind, chosen, with_examples, written

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}
_NAMES = ("Mara", "Jonas", "Amina", "Li", "Pavel", "Rosa", "Tariq", "Ingrid", "Kofi", "Yuki", "Elena", "Bruno")
_CITIES = ("Oslo", "Lima", "Accra", "Kyoto", "Porto", "Tunis", "Riga", "Hanoi", "Quito", "Perth", "Lyon", "Izmir")
_JOBS = ("baker", "pilot", "nurse", "farmer", "teacher", "tailor", "sailor", "miner", "painter", "smith")


def _copy(dice: Dice) -> dict[str, Any]:
    words = ["".join(dice.one(_LETTERS) for _ in range(dice.between(1, 4))) for _ in range(dice.between(3, 8))]
    said = " ".join(words)
    return {"text": f"Repeat: {said}\nRepeated:", "target": said}


def _brackets(dice: Dice) -> dict[str, Any]:
    """What has to be closed next is what was opened last."""
    said: list[str] = []
    still: list[str] = []
    for _ in range(dice.between(4, 16)):
        if still and dice.below(2):
            said.append(_PAIRS[still.pop()])
        else:
            still.append(dice.one("([{<"))
            said.append(still[-1])
    if not still:
        still.append(dice.one("([{<"))
        said.append(still[-1])
    choices = list(_PAIRS.values())
    return {"text": " ".join(said), "choices": choices, "answer": choices.index(_PAIRS[still[-1]]), "open": len(still)}


def _json(dice: Dice) -> dict[str, Any]:
    """The keys are asked for in an order of their own, so that the answer is no copy of the sentence."""
    name, city, job, age = dice.one(_NAMES), dice.one(_CITIES), dice.one(_JOBS), dice.between(18, 90)
    told = {"name": name, "age": age, "city": city, "job": job}
    keys = dice.some(list(told), dice.between(2, 4))
    return {
        "text": f"{name} is {age} years old, lives in {city} and works as a {job}.\n"
        f"As JSON with the keys {', '.join(keys)}:",
        "target": json.dumps({key: told[key] for key in keys}),
    }


COPY = Kind(1, "words of random letters, said again", _copy, with_examples(written(64, r"(\S.*\S|\S)"), 3))
BRACKETS = Kind(1, "which of four brackets closes next", _brackets, with_examples(chosen(), 4))
JSON = Kind(
    1,
    "what a sentence says, as JSON with the keys that are asked for, in their order",
    _json,
    with_examples(written(64, r"(\{.*\})", ignoring=(r"\s",)), 3),
)
