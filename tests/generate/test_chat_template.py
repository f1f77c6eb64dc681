"""Chat templates: the bytes that transformers renders, and nothing else that a stranger's program may do."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.data.tokenizer import ByteTokenizer, load_tokenizer
from shoal.errors import DataError, ShoalError, UsageError
from shoal.generate.chat_template import ChatTemplate, messages_of, plain_template, template_of
from shoal.generate.limited import Allowance
from shoal.values import BadValue
from tests.generate.folders import CHATML, byte_level

TEMPLATES = {
    "chatml": CHATML,
    "instruct": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'].strip() %}
    {%- set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% set system = '' %}{% endif %}
{% for m in loop_messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles alternate ' ~ m.role) }}{% endif %}
    {% if m.role == 'user' %}[INST] {{ (system ~ '\n\n' if loop.first and system else '') ~ m.content | trim }} [/INST]
    {%- else %} {{ m.content }}{{ eos_token }}{% endif %}
{% endfor %}""",
    "tools": """{%- if tools %}{{ '# Tools\n' }}{% for tool in tools %}{{ tool | tojson }}
{{ tool.function | tojson(indent=2) }}{% endfor %}{% endif %}
{%- set ns = namespace(turn=0, last=none) %}
{%- for message in messages %}{% set ns.turn = ns.turn + 1 %}{% if message.role == 'skip' %}{% continue %}{% endif %}
{%- if message.reasoning_content is defined %}<think>{{ message.thinking }}</think>{% endif %}
{{- '<' ~ message.role ~ ' ' ~ ns.turn ~ '>' }}
{{- message.content if message.content is string else message.content | map(attribute='text') | join('|') }}
{%- if message.tool_calls %}{{ message.tool_calls | tojson(sort_keys=true) }}{% endif %}
{%- if ns.turn > 3 %}{% break %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<assistant>
{%- if enable_thinking is defined and enable_thinking %}<think>{% endif %}{% endif %}""",
    "trained": """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}
{% endgeneration %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{{ dict(a=1)['a'] }}{{ pad_token }}""",
    "macros": """{% macro turn(m, n=1) %}{{ n }}: {{ m['content'] | upper | replace('A', 'b') }} {% endmacro %}
{% for m in messages | reject('none') %}{{ turn(m, loop.index) }}{{ m.items() | list | length }}{% endfor %}
{{ 'é<&>' | tojson }}{{ [1, 2.5, None, true] | tojson }}{{ '%05.1f' | format(3.14159) }}{{ messages[-1].content[:2] }}
  {%- if messages | selectattr('role', 'equalto', 'system') | list %} with{% endif %}
""",
    "silent": "{# nothing #}",
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": " Be short. "},
        {"role": "user", "content": "é <|im_end|> a\n"},
        {"role": "assistant", "content": "Yes.", "thinking": "hm"},
        {"role": "user", "content": " again "},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    [{"role": "user", "content": "a"}, {"role": "skip", "content": "b"}, {"role": "assistant", "content": "c"}] * 2,
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"z": 1, "a": "é"}}}],
}
CHATS.append([{"role": "user", "content": "a"}, CALL, {"role": "tool", "content": "{}"}])
TOOL = {"type": "function", "function": {"name": "f", "description": "it's <b>", "parameters": {"type": "object"}}}


def write(where: Path, template: object, **more: object) -> Path:
    where.mkdir(exist_ok=True)
    (where / "tokenizer.json").write_text(byte_level().to_str())
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **more}
    if template is not None:
        said["chat_template"] = template
    (where / "tokenizer_config.json").write_text(json.dumps(said))
    return where


def ours(folder: Path, name: str | None = None) -> ChatTemplate:
    found = template_of(folder, load_tokenizer(folder, special=True), name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_bytes_and_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write(tmp_path, TEMPLATES[name])
    theirs, tokenizer = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder, special=True)
    template, compared = ours(folder), 0
    for chat in CHATS:
        for more in ({}, {"tools": [TOOL]}, {"enable_thinking": True}):
            for answer in (True, False):
                try:
                    said = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=answer, **more)
                except Exception as e:  # bare: whatever Jinja or the template itself raises
                    said = e
                if isinstance(said, str):
                    assert template.rendered([chat], answer, **more) == [said]
                    compared += 1
                else:
                    with pytest.raises(ShoalError, match="chat template") as refused:
                        template.rendered([chat], answer, **more)
                    assert str(said)[:10] in str(refused.value)
        if isinstance(said, str):
            ids = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            assert template.tokens(tokenizer, chat) == ids
    assert compared >= 6


def test_a_template_that_begins_with_the_start_token_gets_no_second_one(tmp_path: Path) -> None:
    folder = write(tmp_path, "{{ bos_token }}{{ messages[0].content }}", add_bos_token=True)
    tokenizer = load_tokenizer(folder, special=True)
    ids = ours(folder).tokens(tokenizer, [{"role": "user", "content": "a"}])
    assert ids == [tokenizer.start_id, *tokenizer.encode("a")]


def test_all_the_places_where_templates_lie(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    chat = [{"role": "user", "content": "x"}]
    folder = write(tmp_path / "a", None)
    assert template_of(folder, load_tokenizer(folder)) is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    assert ours(folder).rendered([chat]) == ["old"]
    folder = write(tmp_path / "b", [{"name": "default", "template": "one"}, {"name": "rag", "template": "two"}])
    assert [ours(folder, name).rendered([chat])[0] for name in (None, "rag")] == ["one", "two"]
    with pytest.raises(UsageError, match="no chat template 'nope'; there are: default, rag"):
        ours(folder, "nope")
    (folder / "chat_template.jinja").write_text("a\r\nb{{ eos_token }}\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "more.jinja").write_text("three")
    theirs = AutoTokenizer.from_pretrained(folder)
    for name in (None, "more"):
        assert ours(folder, name).rendered([chat]) == [
            theirs.apply_chat_template(chat, chat_template=name, tokenize=False)
        ]


def test_what_ends_a_turn_is_found(tmp_path: Path) -> None:
    folder = write(tmp_path, CHATML)
    tokenizer = load_tokenizer(folder, special=True)
    (end,) = ours(folder).stop_ids(tokenizer)
    assert tokenizer.spelled(end) == "<|im_end|>"
    assert plain_template("run").stop_ids(ByteTokenizer()) == frozenset()


def test_the_plain_template_begins_a_document_once() -> None:
    ids = plain_template("run").tokens(ByteTokenizer(), [{"role": "user", "content": "hi"}])
    assert ids == [256, *b"User: hi\nAssistant:"]


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].environ }}",
    "{{ raise_exception.__globals__ }}{{ raise_exception.__code__ }}",
    "{{ (messages | attr('append'))({}) }}",
    "{{ messages.append({}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ self.__init__.__globals__ }}",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "{{ namespace(__class__=1) }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ ('{0.__class__.__init__.__globals__}' | format)(messages) }}",
    "{{ dict.__class__ }}{{ dict.__call__.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
)


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_does_not_get_out_of_its_sandbox(source: str) -> None:
    said = "refused"
    with contextlib.suppress(DataError):
        (said,) = ChatTemplate(source, "a stranger's folder").rendered([[{"role": "user", "content": "x"}]])
    for secret in ("<class", "<function", "object at", "root:", "PATH", "environ"):
        assert secret not in said


BOMBS = {
    "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'a' * 1000 }}{% endfor %}{% endfor %}",
    "memory": "{{ ('a' * 10 ** 9) * 100 }}",
    "number": "{{ 9 ** (9 ** 9) }}",
    "width": "{{ '%1000000000d' % 1 }}{{ '%3000000000d' | format(1) }}",
    "depth": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "source": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_takes_neither_time_nor_memory_without_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shoal.generate.chat_template.RENDER", Allowance(cpu_s=1, memory_bytes=256 << 20, answer_bytes=1 << 20)
    )
    with pytest.raises(DataError, match="the chat template of a folder cannot be used") as refused:
        ChatTemplate(BOMBS[name], "a folder").rendered([[{"role": "user", "content": "x"}]])
    assert len(str(refused.value)) < 300


def test_what_a_template_says_of_a_conversation_is_told() -> None:
    template = ChatTemplate("{{ raise_exception('no \x1b[31m system') }}", "it")
    with pytest.raises(UsageError, match="the chat template of it says: 'no ") as refused:
        template.rendered([[{"role": "user", "content": "x"}]])
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize("said", [[], {}, "x", [1], [{}], [{"role": 1}], [{"role": "r" * 200}]])
def test_what_is_no_conversation_is_refused(said: object) -> None:
    with pytest.raises(BadValue):
        messages_of(said)


@pytest.mark.parametrize("said", [1, [1], [{"name": "a"}], "x" * (2 << 20), {"a": "b"}])
def test_what_is_no_template_is_refused(said: object, tmp_path: Path) -> None:
    folder = write(tmp_path, None)
    tokenizer = load_tokenizer(folder)
    write(tmp_path, said)
    with pytest.raises(DataError, match="no chat template that can be read"):
        template_of(folder, tokenizer)
