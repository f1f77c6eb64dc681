"""Regular expressions as rules: the same texts as `re.fullmatch` takes, alone and within JSON."""

from __future__ import annotations

import itertools
import json
import re
from random import Random

import pytest

from shoal.data.tokenizer import ByteTokenizer
from shoal.generate.form import REGEX, SCHEMA, Form
from shoal.generate.grammar import Forms
from shoal.generate.pattern import as_rule
from shoal.values import BadValue

LETTERS = "a1b.x+"
TEXTS = ["".join(t) for n in range(4) for t in itertools.product(LETTERS, repeat=n)] + ["1111", "aaaa", "1.11", "abab"]
KNOWN = (
    # xgrammar 0.2.8 takes numbers of any length for the first of them, within JSON
    *(
        r"^[+\-]?[0-9]{1,3}(\.[0-9]+)?$",
        "a{2}(ba+)?",
        "^a|b$",
        r"[^\W]x?",
        r"(?:a|ab)(?:b|1)*?",
        ".{2}",
        r"\.+\d",
        "(a|)x",
    ),
)


@pytest.fixture(scope="module")
def forms() -> Forms:
    return Forms(ByteTokenizer())


def made(rng: Random, depth: int = 2) -> str:
    kind = rng.randrange(8 if depth else 3)
    if kind < 2:
        return rng.choice(("a", "b", "1", "x", r"\.", r"\+"))
    if kind == 2:
        return rng.choice(("[ab]", "[^a]", r"\d", r"\w", ".", "[a1]", "[^ab1]", r"[\d.]"))
    if kind < 5:
        return made(rng, depth - 1) + made(rng, depth - 1)
    if kind == 5:
        return f"({made(rng, depth - 1)}|{made(rng, depth - 1)})"
    return f"({made(rng, depth - 1)})" + rng.choice(("*", "+", "?", "{2}", "{1,2}", "{0,2}", "{2,}"))


@pytest.mark.parametrize("pattern", [*KNOWN, *(made(Random(seed)) for seed in range(12))])
def test_the_same_texts_as_fullmatch(pattern: str, forms: Forms) -> None:
    schema = Form(SCHEMA, json.dumps({"type": "string", "pattern": pattern}))
    for text in TEXTS:
        fits = re.fullmatch(pattern, text) is not None
        assert forms.holds(Form(REGEX, pattern), text) == fits, text
        assert forms.holds(schema, json.dumps(text)) == fits, text


def test_quotes_and_backslashes_are_escaped_within_json(forms: Forms) -> None:
    for pattern, text in ((r'a"b', 'a"b'), (r"\\", "\\"), (r'["\\]{2}', '\\"')):
        schema = Form(SCHEMA, json.dumps({"type": "string", "pattern": pattern}))
        assert forms.holds(schema, json.dumps(text))
        assert forms.holds(Form(REGEX, pattern), text)
    anything = Form(SCHEMA, json.dumps({"type": "string", "pattern": "[^x]+"}))
    assert not forms.holds(anything, '"a"b"')


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?=a)b", "looks ahead"),
        ("(?<!a)b", "looks ahead or behind"),
        (r"(a)\1", "comes again"),
        ("(?i)a", "flags"),
        ("a^b", "in the middle"),
        (r"a\b", "in the middle"),
        ("(", "no regular expression"),
        ("a" * 5000, "4,096"),
        ("a{9999999}", "times"),
        ("(" * 3000 + ")" * 1000, "no regular expression"),
        ("[^\\s\\S]", "without a character"),
    ],
)
def test_what_no_rule_can_say_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(BadValue, match=why):
        as_rule(pattern, within_json=True)
