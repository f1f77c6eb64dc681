"""What generation reads of others: schemas, chat templates, files of prompts, conversations, answers of servers."""

from __future__ import annotations

import argparse
import io
import json
from http.client import HTTPResponse
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.json_values import encoded, mutated
from tests.fuzz.of_data import emptied
from tests.fuzz.raw_bytes import damaged
from tests.fuzz.reader import Finding, Folder, Target, reader
from tests.fuzz.samples import one_file_of
from tests.generate.schemas import PATTERNS, document_schema


@reader("schemas", "generate.schema", "generate.pattern", quick=300)
def schemas(_: Path) -> Target:
    from shoal.generate.pattern import as_rule
    from shoal.generate.schema import narrowed
    from shoal.values import BadValue

    def generate(rng: Random) -> dict[str, str]:
        schema: Any = document_schema(rng)
        pattern = rng.choice(PATTERNS)
        if rng.random() < 0.7:
            schema = mutated(rng, schema)
            cut = rng.randrange(len(pattern))
            pattern = (
                pattern[:cut]
                + rng.choice("()[]{}*+?|^$\\-.,:=!<2bdDwW\x00é") * rng.choice((1, 1, 2, 500))
                + pattern[cut:]
            )
        text = encoded(schema)
        return {"schema": (damaged(rng, text) if rng.random() < 0.1 else text).decode("latin-1"), "pattern": pattern}

    def read(case: dict[str, str]) -> None:
        made, rules = narrowed(case["schema"].encode("latin-1"))
        if not isinstance(json.loads(made), dict) or not all(isinstance(rule, str) for rule in rules):
            raise Finding("no schema comes out")
        as_rule(case["pattern"], within_json=True)

    return Target(generate, read, (BadValue,))


@reader("chat-template", "generate.chat_template", "generate.chat", quick=120)
def chat_template(folder: Path) -> Target:
    from shoal.data.tokenizer import ByteTokenizer
    from shoal.errors import ShoalError
    from shoal.generate.chat import _ends
    from shoal.generate.chat_template import messages_of, template_of
    from shoal.values import BadValue, read_json

    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"}
    several = {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}
    vocab = {"<unk>": 0, "</s>": 1, "<s>": 2, "a": 3}
    level = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    good = Folder(
        {
            "tokenizer_config.json": json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}).encode(),
            "tokenizer.json": json.dumps({"version": "1.0", "model": level, "added_tokens": []}).encode(),
            "chat_template.json": json.dumps(several).encode(),
            "chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}",
            "additional_chat_templates/more.jinja": b"{{ messages }}",
            "generation_config.json": b'{"eos_token_id": [1, 2]}',
            "config.json": b'{"eos_token_id": 1}',
            "messages.json": b'[{"role": "user", "content": "a"}, {"role": "tool", "content": [{"type": "text"}]}]',
        }
    )

    def generate(rng: Random) -> Folder:
        one = Folder({name: text for name, text in good.items() if name == "messages.json" or rng.random() < 0.7})
        names = [name for name in one if name.endswith(".json")]
        return one if rng.random() < 0.2 else one_file_of(one, names, rng)

    def read(case: Folder) -> None:
        where = case.write(emptied(folder / "one"))
        for name in (None, "more"):
            template_of(where, ByteTokenizer(), name)
        _ends(where)
        messages_of(read_json(case.get("messages.json", b"")))

    return Target(generate, read, (ShoalError, BadValue))


@reader("prompts", "cli.sample", quick=200)
def prompts(folder: Path) -> Target:
    from shoal.cli.sample import _form, _prompts
    from shoal.errors import ShoalError

    def generate(rng: Random) -> Folder:
        lines = [
            encoded(mutated(rng, {"prompt": "a b", "id": 3}) if rng.random() < 0.4 else {"prompt": "é"})
            for _ in range(4)
        ]
        text = b"\n".join(lines)
        name = rng.choice(("p.jsonl", "p.txt"))
        return Folder({name: damaged(rng, text) if rng.random() < 0.3 else text})

    def read(case: Folder) -> None:
        (name,) = case
        where = str(case.write(emptied(folder / "one")) / name)
        found = _prompts(argparse.Namespace(prompt=None, prompts=where))
        if not found or not all(isinstance(one, str) for one in found):
            raise Finding("no prompts come out")
        _form(argparse.Namespace(schema=None, any_json=False, regex=None, grammar=where))

    return Target(generate, read, (ShoalError,))


@reader("chat-server", "generate.remote", quick=200)
def chat_server(_: Path) -> Target:
    from shoal.errors import ShoalError
    from shoal.generate.remote import There

    def event(rng: Random) -> bytes:
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": rng.choice((None, "stop", "length"))}
        said: Any = {"id": "x", "choices": [choice]}
        return b"data: " + encoded(mutated(rng, said) if rng.random() < 0.3 else said) + b"\n\n"

    def generate(rng: Random) -> dict[str, str]:
        listed: Any = {"data": [{"id": "m"}]}
        status = b"HTTP/1.1 %d X\r\n" % rng.choice((200, 200, 200, 200, 302, 401, 500))
        stream = b"".join(event(rng) for _ in range(3)) + rng.choice((b"data: [DONE]\n\n", b""))
        kind = rng.choice((b"text/event-stream", b"application/json"))
        if kind == b"application/json":
            stream = encoded(mutated(rng, {"choices": [{"message": {"content": "a"}}], "error": None}))
        reply = status + b"Content-Type: " + kind + b"\r\n\r\n" + stream
        models = b"HTTP/1.1 200 OK\r\n\r\n" + encoded(mutated(rng, listed) if rng.random() < 0.3 else listed)
        if rng.random() < 0.1:
            reply = damaged(rng, reply)
        return {"models": models.decode("latin-1"), "reply": reply.decode("latin-1")}

    class Connection:
        """What a server says, without the server."""

        def __init__(self, said: str) -> None:
            self._said = said.encode("latin-1")

        def request(self, *_: object, **__: object) -> None:
            pass

        def makefile(self, _: str) -> io.BytesIO:
            return io.BytesIO(self._said)

        def getresponse(self) -> HTTPResponse:
            response = HTTPResponse(self)  # type: ignore[arg-type]  # it asks a socket for a file alone
            response.begin()
            return response

        def close(self) -> None:
            pass

    def read(case: dict[str, str]) -> None:
        said = [case["models"], case["reply"]]

        class Told(There):
            def _connection(self) -> Any:
                return Connection(said.pop(0))

        partner = Told("http://somewhere", {})
        for piece in partner.answer([{"role": "user", "content": "a"}], lambda: False):
            piece.encode()
        if not partner.ended().why:
            raise Finding("it does not say how it ended")

    return Target(generate, read, (ShoalError,))
