"""One line of a file of prompts, as somebody wrote it: what is asked, and how, or one sentence that says what is wrong
with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from shoal import values
from shoal.errors import UsageError
from shoal.generate.chat_template import messages_of
from shoal.generate.request import Sampling
from shoal.values import BadValue

MOST_LINE_BYTES = 8 << 20
MOST_PARTS = 1 << 20  # values in a line, tokens among them
MOST_CHARACTERS = MOST_LINE_BYTES
MOST_TOKENS = 1 << 20
MOST_MESSAGES = 1 << 14
MOST_STOPS = 64
WHATS = ("prompt", "messages", "tokens")

_number: dict[str, Callable[[Any], Any]] = {
    "max_tokens": values.whole,
    "temperature": values.real,
    "top_k": values.maybe(values.whole),
    "top_p": values.real,
    "min_p": values.real,
    "repetition_penalty": values.real,
    "presence_penalty": values.real,
    "frequency_penalty": values.real,
    "seed": values.whole,
    "ignore_stop": values.flag,
}


@dataclass(frozen=True)
class Item:
    line: int
    """Of the file, counted from 1."""
    id: str | int | None = None
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    tokens: tuple[int, ...] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """What of `Sampling` is its own."""
    stops: tuple[str, ...] | None = None

    def sampled(self, usual: Sampling, seed: int) -> Sampling:
        """How its tokens are picked. Draws of two lines are not the same, and do not depend on which part has them."""
        own = {"seed": seed_of(seed, self.line), **self.sampling}
        try:
            return dataclasses.replace(usual, **own)
        except UsageError as e:
            raise BadValue(str(e).rstrip("."), "sampling") from None


def seed_of(seed: int, line: int) -> int:
    return xxhash.xxh3_64_intdigest(b"%d %d" % (seed, line)) >> 1


def item_of(raw: bytes, line: int, json_lines: bool) -> Item | None:
    """None for a blank line. BadValue says what is wrong."""
    if len(raw) > MOST_LINE_BYTES:
        raise BadValue(f"it has more than {MOST_LINE_BYTES >> 20} MiB, the most that a line may have")
    if line == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    raw = raw.rstrip(b"\r\n")
    if not raw.strip():
        return None
    if json_lines:
        return _of_object(values.read_object(raw, most_parts=MOST_PARTS), line)
    try:
        return Item(line, prompt=raw.decode())
    except UnicodeDecodeError as e:
        raise BadValue(f"it is no UTF-8 (byte {e.start + 1:,} of the line)") from None


def _of_object(said: Mapping[str, Any], line: int) -> Item:
    whats = [name for name in WHATS if name in said]
    if len(whats) != 1:
        has = " and ".join(f"'{name}'" for name in whats) or "none"
        raise BadValue(f"it needs one of 'prompt', 'messages' and 'tokens', and has {has}")
    if misplaced := sorted((_number.keys() | {"stop"}) & said.keys()):
        raise BadValue(f"'{misplaced[0]}' belongs in an object 'sampling'")
    known: dict[str, Callable[[object], Any]] = {
        "id": _id,
        "prompt": _prompt,
        "messages": _messages,
        "tokens": _tokens,
        "sampling": _sampling,
    }
    found = {name: values.field(said, name, read) for name, read in known.items() if name in said}
    stops = found.get("sampling", {}).pop("stop", None)
    return Item(line, **found, stops=stops)


def _id(said: object) -> str | int | None:
    return said if said is None else values.short(said) if isinstance(said, str) else values.whole(said)


def _prompt(said: object) -> str:
    return values.text(said, MOST_CHARACTERS)


def _tokens(said: object) -> tuple[int, ...]:
    return tuple(values.each(values.whole, MOST_TOKENS)(said))


def _messages(said: object) -> tuple[Mapping[str, Any], ...]:
    return tuple(messages_of(values.items(said, MOST_MESSAGES)))


def _sampling(said: object) -> dict[str, Any]:
    known = {**_number, "stop": _stops}
    given = values.fields_of(said)
    if unknown := given.keys() - known.keys():
        raise BadValue(f"'{min(unknown)[:40]}' is none of {', '.join(sorted(known))}")
    return {name: values.field(given, name, known[name]) for name in given}


def _stops(said: object) -> tuple[str, ...]:
    listed: Sequence[object] = [said] if isinstance(said, str) else values.items(said, MOST_STOPS)
    found = tuple(values.short(one) for one in listed)
    if "" in found:
        raise BadValue("an empty text, which ends nothing")
    return found
