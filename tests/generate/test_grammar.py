"""Answers in a form: what comes out is valid, whatever the model would like to say; what is cut off is not called so;
schemas of strangers take neither time nor memory without end."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

from shoal.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from shoal.errors import UsageError
from shoal.generate.answers import Answer
from shoal.generate.engine import Engine
from shoal.generate.form import GRAMMAR, JSON, REGEX, SCHEMA, Form
from shoal.generate.grammar import COMPILE, Forms
from shoal.generate.request import ERROR, LENGTH, STOP, Sampling
from shoal.generate.texts import Speaker
from tests.generate.folders import KINDS, random_model
from tests.generate.schemas import document_schema
from tests.slow import some_slow


def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "byte":
        return ByteTokenizer()
    return JsonTokenizer(KINDS[kind]().to_str(), kind, eos="</s>", start="<s>")


def answers(
    tokenizer: Tokenizer, forms: Forms, asked: Sequence[Form], sampling: Sampling, batch: int = 32
) -> Iterator[Answer]:
    """Of a model that knows nothing, which draws among what it may say."""
    engine = Engine(random_model(tokenizer.vocab_size + 5), vocab_size=tokenizer.vocab_size, batch=batch)
    speaker = Speaker(engine, tokenizer)
    prompt = tokenizer.encode("a")
    sampling = replace(sampling, stop_ids=frozenset({tokenizer.eos_id}))
    held = {
        speaker.ask(prompt, replace(sampling, seed=i), mask=forms.mask(form)): Answer("a", prompt)
        for i, form in enumerate(asked)
    }
    for piece in speaker.run():
        held[piece.request].add(piece)
    for form, answer in zip(asked, held.values(), strict=True):
        answer.valid = forms.holds(form, answer.text)
        yield answer


def check(schemas: Sequence[dict[str, Any]], kind: str) -> int:
    """How many were cut off; all others must be valid by a judge who knows nothing of ours."""
    tokenizer = tokenizer_of(kind)
    forms = Forms(tokenizer)
    asked = [Form(SCHEMA, json.dumps(schema)) for schema in schemas]
    cut = 0
    for schema, answer in zip(schemas, answers(tokenizer, forms, asked, Sampling(max_tokens=900)), strict=True):
        if answer.finish == LENGTH:
            cut += 1
            assert not answer.valid
            continue
        assert answer.finish == STOP, answer.error
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
        assert answer.valid
    return cut


@pytest.mark.parametrize("kind", ["byte", *KINDS])
def test_random_schemas_give_valid_documents(kind: str) -> None:
    rng = Random(f"quick {kind}")
    assert check([document_schema(rng) for _ in range(15)], kind) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_random_schemas_give_a_thousand_valid_documents(part: int) -> None:
    """A hundred at a time. For those that 900 tokens cut off others are asked: it is about those that end."""
    rng, left = Random(part), 100
    kind = ("byte", *KINDS)[part % 4]
    while left:
        left = check([document_schema(rng) for _ in range(left)], kind)


def test_what_is_cut_off_is_not_called_valid() -> None:
    tokenizer = ByteTokenizer()
    form = Form(SCHEMA, json.dumps({"type": "string", "minLength": 50}))
    (answer,) = answers(tokenizer, Forms(tokenizer), [form], Sampling(max_tokens=20))
    assert (answer.finish, answer.valid) == (LENGTH, False)
    assert len(answer.text) <= 21
    assert "most that were asked for" in answer.why(1024)


@pytest.mark.parametrize("kind", ["byte", *KINDS])
def test_expressions_grammars_and_any_json(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    pattern = r"[a-z]{2,4}: \d+(, \d+)?"
    asked = [Form(REGEX, pattern)] * 4 + [Form(GRAMMAR, 'root ::= ("a" | "b" root "b")')] * 4 + [Form(JSON)] * 4
    got = list(answers(tokenizer, Forms(tokenizer), asked, Sampling(max_tokens=400)))
    for answer in got[:4]:
        assert re.fullmatch(pattern, answer.text)
    for answer in got[4:8]:
        assert answer.finish == LENGTH or re.fullmatch(r"(b*)a\1", answer.text)
    for answer in got[8:]:
        assert answer.finish == LENGTH or json.loads(answer.text) is not ...
    assert sum(answer.valid is True for answer in got) >= 9


def test_an_answer_ends_with_its_form_and_not_later() -> None:
    tokenizer = ByteTokenizer()
    form = Form(SCHEMA, '{"const": "abc"}')
    (answer,) = answers(tokenizer, Forms(tokenizer), [form], Sampling(max_tokens=400))
    assert (answer.text, answer.finish, len(answer.tokens)) == ('"abc"', STOP, 5)


def test_characters_that_are_none_and_control_characters_do_not_come() -> None:
    """xgrammar takes both in strings, where JSON takes neither."""
    mask = (forms := Forms(ByteTokenizer())).mask(Form(SCHEMA, '{"type": "string", "maxLength": 3}'))
    mask.accept(ord('"'))
    assert not mask.allowed()[:32].any()
    mask.accept(0xED)
    assert mask.allowed().nonzero()[:, 0].tolist() == list(range(0x80, 0xA0))
    assert not forms.holds(Form(SCHEMA, '{"type": "string"}'), '"\t"')


def test_special_tokens_and_holes_are_never_allowed() -> None:
    tokenizer = tokenizer_of("byte-level")
    special = [i for i in range(tokenizer.vocab_size) if i != tokenizer.eos_id and not tokenizer.decode([i])]
    assert len(special) >= 3
    allowed = Forms(tokenizer).mask(Form(REGEX, ".*")).allowed()
    assert not allowed[special].any()
    assert allowed[tokenizer.eos_id]


def test_a_vocabulary_that_cannot_write_the_form_says_so_and_others_go_on() -> None:
    tokenizer = tokenizer_of("metaspace")
    asked = [Form(REGEX, "龍"), Form(REGEX, "abc")]
    first, second = answers(tokenizer, Forms(tokenizer), asked, Sampling(max_tokens=9))
    assert first.finish == ERROR
    assert "no token of this tokenizer" in first.error
    assert second.text == "abc"


def test_a_form_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = Forms(ByteTokenizer())
    forms.mask(Form(REGEX, "a+"))
    monkeypatch.setattr("shoal.generate.grammar.limited", lambda *_: pytest.fail("again"))
    forms.mask(Form(REGEX, "a+"))


REFUSED = {
    "not": '{"not": {"type": "string"}}',
    "more than one part": '{"allOf": [{"type": "object"}, {"required": ["a"]}]}',
    "may fit both": '{"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}',
    "uniqueItems": '{"type": "array", "uniqueItems": true}',
    "beside a length": '{"type": "string", "pattern": "a", "maxLength": 3}',
    "points to nothing": '{"$ref": "#/$defs/gone"}',
    "not in the schema itself": '{"$ref": "https://example.com/schema.json"}',
    "no document ever ends": '{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}',
    "nothing in between": '{"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}',
    "which no document is": "false",
    "is no JSON": "{",
    "looks ahead": '{"type": "string", "pattern": "(?=a)b"}',
    "is required, and is no field": '{"properties": {}, "required": ["a"], "additionalProperties": false}',
    "no integer lies between": '{"type": "integer", "minimum": 1.2, "maximum": 1.8}',
    "one of": '{"type": "text"}',
    "where an object belongs": "[1]",
    "deep": '{"items": ' * 200 + "{}" + "}" * 200,
    "more than": json.dumps({"enum": list(range(300_000))}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_schema_that_cannot_be_kept_to_is_refused_in_a_sentence(why: str) -> None:
    with pytest.raises(UsageError, match="no answer can be held to the schema") as refused:
        Forms(ByteTokenizer()).mask(Form(SCHEMA, REFUSED[why]))
    assert why in str(refused.value)
    assert len(str(refused.value)) < 400
    assert str(refused.value).count("\n") == 0


BOMBS = {
    "counts": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "string", "minLength": 99_999}, "minItems": 99_999},
    },
    "alternatives": {
        "anyOf": [{"type": "string", "pattern": f"(a|b|{i})*c{{0,900}}(d|e){{0,900}}"} for i in range(300)]
    },
    "nested repeats": {"type": "string", "pattern": "((((a{0,300}){0,300}){0,300}){0,300}){0,300}"},
    "many fields": {
        "type": "object",
        "properties": {f"f{i}": {"type": "integer"} for i in range(3000)},
        "minProperties": 1500,
    },
}


@pytest.mark.parametrize("name", some_slow([*BOMBS], slow=["alternatives", "many fields"]))
def test_a_schema_bomb_is_refused_or_taken_within_limits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.generate.grammar.COMPILE", replace(COMPILE, cpu_s=2))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time()
    with contextlib.suppress(UsageError):
        Forms(ByteTokenizer()).mask(Form(SCHEMA, json.dumps(BOMBS[name]))).allowed()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 4
    assert time.process_time() - own < 10


def test_without_xgrammar_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.errors import SetupError

    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    with pytest.raises(SetupError, match=r"\[structured\]"):
        Forms(ByteTokenizer())


def test_a_tokenizer_whose_tokens_are_no_pieces_of_text_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models

    from shoal.errors import DataError

    library = Library(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "[SEP]": 3}, unk_token="[UNK]"))
    for decoder in (None, decoders.WordPiece()):
        if decoder is not None:
            library.decoder = decoder
        with pytest.raises(DataError, match="held to a form"):
            Forms(JsonTokenizer(library.to_str(), "words", eos="[SEP]"))
