"""Conversations as the text that a model was taught them in, by the template that its folder brings.

A template is a stranger's program in Jinja. It is run as transformers 5 runs it, to the same bytes: in a sandbox, which
keeps it from what is not its own, and in a child with limits, as a sandbox bounds neither time nor memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shoal import values
from shoal.data.starts import begun
from shoal.data.tokenizer import JsonTokenizer, Tokenizer
from shoal.data.tokenizer_folder import resolve
from shoal.data.tokenizer_tokens import NAMED
from shoal.errors import DataError, UsageError
from shoal.generate.limited import Allowance, Refused, limited
from shoal.plain_file import is_plain, read_object, read_plain
from shoal.values import BadValue, inside, shown

if TYPE_CHECKING:
    from jinja2 import Environment

DEFAULT, TOOLS = "default", "tool_use"
CONFIG, FILE, OLD_FILE, MORE = (
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
MOST_BYTES = 1 << 20  # of a template; the longest that are published have 30 KB
RENDER = Allowance(cpu_s=10, memory_bytes=1 << 30, answer_bytes=64 << 20)
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names for the same: templates read the first or second
# For models without one.
PLAIN = """\
{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
PLAIN_STOP = "\nUser:"
Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    where: str
    marks: Mapping[str, str] = field(default_factory=dict)
    """`bos_token` and the like: what templates call them, and how they are spelled."""

    @property
    def is_plain(self) -> bool:
        return self.source == PLAIN

    def rendered(self, chats: Sequence[Sequence[Message]], answer: bool = True, **more: Any) -> list[str]:
        """Each of them as text, up to where an `answer` begins. `more` is what templates take beside: `tools`,
        `documents`, `enable_thinking` …"""
        given = {"tools": None, "documents": None, "add_generation_prompt": answer, **self.marks, **more}
        chats = [[_aliased(message) for message in chat] for chat in chats]
        _environment()  # so that a child finds it imported
        try:
            said = limited(lambda: _rendered(self.source, chats, given), RENDER)
        except Refused as e:
            if str(e).startswith(_OWN_WORDS):
                raise UsageError(f"the chat template of {self.where} {e}.") from None
            raise DataError(f"the chat template of {self.where} cannot be used: {e}.") from None
        return [str(text) for text in json.loads(said)]  # of our own child

    def tokens(self, tokenizer: Tokenizer, messages: Sequence[Message], **more: Any) -> list[int]:
        """A conversation for a model to answer. What stands for a start token in the template is the only one."""
        (text,) = self.rendered([messages], **more)
        ids = tokenizer.encode(text)
        return begun(ids, tokenizer.start_id) if self.is_plain else ids

    def stop_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """What the template puts behind an answer, where that is a special token: it ends answers."""
        said = "an answer"
        try:
            (text,) = self.rendered([[{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]], False)
        except (UsageError, DataError):
            return frozenset()
        after = tokenizer.encode(text.rpartition(said)[2])[:1]
        return frozenset(i for i in after if said in text and not tokenizer.decode([i]))


def template_of(folder: Path, tokenizer: Tokenizer, name: str | None = None) -> ChatTemplate | None:
    """The template of a Hugging Face folder, or one of several by its name; None: it has none."""
    try:
        found = _found(folder)
    except BadValue as e:
        raise DataError(f"{folder} has no chat template that can be read ({e}).") from None
    except OSError as e:
        raise DataError(f"a chat template in {folder} cannot be read ({e.strerror or e}).") from None
    if not found and name is None:
        return None
    if (name or DEFAULT) not in found:
        there = ", ".join(sorted(map(shown, found))) or "none"
        raise UsageError(f"{folder} has no chat template '{name or DEFAULT}'; there are: {there}.")
    named = tokenizer.named if isinstance(tokenizer, JsonTokenizer) else {}
    if not any(named.get(role) for role in NAMED):
        named = resolve(folder).named or {}
    marks = {role: token for role in NAMED if isinstance(token := named.get(role), str)}
    return ChatTemplate(found[name or DEFAULT], str(folder), marks)


def plain_template(where: str) -> ChatTemplate:
    return ChatTemplate(PLAIN, where)


def messages_of(said: object) -> list[dict[str, Any]]:
    """A conversation as others write it: `role` and whatever else a template may read."""
    messages = [values.fields_of(one) for one in values.items(said, 100_000)]
    if not messages:
        raise BadValue("no message")
    for i, message in enumerate(messages):
        with inside(f"message {i + 1}"), inside("role"):
            values.text(message.get("role"), 100)
    return messages


def _found(folder: Path) -> dict[str, str]:
    """Name → template; a later place takes the name from an earlier one, as in transformers."""
    found: dict[str, str] = {}
    if is_plain(folder / OLD_FILE):  # of models that see pictures
        found |= _listed(read_object(folder / OLD_FILE, MOST_BYTES * 4), OLD_FILE)
    if is_plain(folder / CONFIG):
        with inside(CONFIG):
            said = values.read_object(read_plain(folder / CONFIG, 16 << 20), huge=True)
            found = _listed(said, CONFIG) or found
    written = {}
    if is_plain(folder / FILE):
        written[DEFAULT] = _text(folder / FILE)
    if (folder / MORE).is_dir():
        for file in sorted((folder / MORE).glob("*.jinja"))[:100]:
            written[file.stem] = _text(file)
    return written or found


def _listed(said: Mapping[str, Any], where: str) -> dict[str, str]:
    template = said.get("chat_template")
    with inside("chat_template"):
        if template is None:
            return {}
        if isinstance(template, list):
            pairs = [values.fields_of(one) for one in values.items(template, 100)]
            return {values.text(one.get("name"), 200): values.text(one.get("template"), MOST_BYTES) for one in pairs}
        return {DEFAULT: values.text(template, MOST_BYTES)}


def _text(file: Path) -> str:
    try:
        return read_plain(file, MOST_BYTES).decode().replace("\r\n", "\n").replace("\r", "\n")  # as a text file
    except UnicodeDecodeError:
        raise BadValue("it is not UTF-8 text", file.name) from None


def _aliased(message: Message) -> dict[str, Any]:
    """What a model thought before its answer is called in three ways."""
    said = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return dict(message) if said is None else {"thinking": said, **message, "reasoning_content": said}


_OWN_WORDS = "says"


def _rendered(source: str, chats: Sequence[Sequence[Message]], given: Mapping[str, Any]) -> bytes:
    """In the child."""
    from jinja2 import TemplateError

    try:
        template = _environment().from_string(source)
        return json.dumps([template.render(messages=chat, **given) for chat in chats]).encode()
    except _Raised as e:
        raise Refused(f"{_OWN_WORDS}: {shown(str(e))}") from None
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise Refused(f"{type(e).__name__}: {shown(str(e))}") from None


class _Raised(Exception):
    """By `raise_exception`: what a template says of the conversation."""


def _environment() -> Environment:
    """As templates expect it: the same settings, names and tags that transformers gives them."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks what a model is trained on; here it is its content."""

        tags = {"generation"}  # noqa: RUF012  # as Jinja reads it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

        def _content(self, caller: Any) -> str:
            return str(caller())

    class Names(Namespace):
        """Without a way to Python's own attributes."""

        def __init__(*given: Any, **names: Any) -> None:  # so that a name may be `self`
            held = dict(*given[1:], **names)
            for name in held:
                _look_at(name)
            Namespace.__init__(given[0], held)

        def __setitem__(self, name: str, value: Any) -> None:
            _look_at(name)
            super().__setitem__(name, value)

    def _look_at(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a name that begins with an underscore, {name!r}")

    class Dictionary:
        """`dict(…)`, without the class."""

        def __call__(self, *given: Any, **names: Any) -> dict[Any, Any]:
            return dict(*given, **names)

        def fromkeys(self, *given: Any) -> dict[Any, Any]:
            return dict.fromkeys(*given)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals |= {"raise_exception": _raise, "strftime_now": _now, "dict": Dictionary(), "namespace": Names}
    return made


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own escapes letters that HTML knows."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> NoReturn:
    raise _Raised(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)
