"""Talk with a model in the terminal: a run's newest checkpoint, a Hugging Face folder, or a server.

  shoal chat RUN
  shoal chat FOLDER --system "You answer in one sentence."
  shoal chat http://localhost:8000

The model's own chat template is used; a model without one gets plain turns, and that is said. /help lists what can be
said beside questions. Ctrl-C ends an answer, not the chat; Ctrl-D ends the chat. A server must answer as OpenAI's
/v1/chat/completions does.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from shoal.cli.opening import add_key, add_opening, key_of, opened_as, run_of
from shoal.cli.sampling_options import add_sampling, refuse_sampling, sampling_of
from shoal.errors import ShoalError, UsageError
from shoal.readable import harmless

if TYPE_CHECKING:
    from shoal.generate.chat import Partner

HELP = """\
/reset        forget the conversation, but for the system message
/system TEXT  what the model is told before the conversation; without TEXT: nothing any more
/save FILE    the conversation as a line of JSON, as `shoal generate` and training read it
/quit         or Ctrl-D"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN|FOLDER|URL", help="who answers")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    parser.add_argument("--template", metavar="NAME", help="one of several chat templates of a folder")
    parser.add_argument(
        "--model", dest="served", metavar="NAME", help="of a URL: which of its models (default: the first)"
    )
    add_key(parser)
    add_sampling(parser, max_tokens=None)
    add_opening(parser)


def run(args: argparse.Namespace) -> int:
    refuse_sampling(args)
    if re.match(r"[a-z][a-z0-9+.-]*://", args.model):
        partner, waits = _there(args), True
    else:
        for name in ("served", "key_from"):
            if getattr(args, name) is not None:
                option = "--model" if name == "served" else "--key-from"
                raise UsageError(f"{option} is for a URL, and {args.model} is none; leave it out.")
        partner, waits = _here(args), False
    _Chat(partner, args.system, waits).run()
    return 0


def _here(args: argparse.Namespace) -> Partner:
    run_dir = run_of(args.model, args)
    from shoal.generate.chat import Here

    opened = opened_as(args.model, run_dir, args, special=True)
    here = Here(opened, sampling_of(args, opened.tokenizer), args.stop, args.exact, args.template)
    if here.template.is_plain:
        _say(f"{opened.name} brings no chat template: it sees plain turns, as in 'User: …' and 'Assistant: …'.")
    return here


def _there(args: argparse.Namespace) -> Partner:
    from shoal.generate.remote import There

    for name, usual in (("step", None), ("tokenizer", None), ("start", None), ("template", None), ("exact", False)):
        if getattr(args, name) != usual:
            raise UsageError(f"--{name} is for a model that is opened here, and {args.model} is a URL; leave it out.")
    return There(args.model, _settings(args), args.served, key_of(args))


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What servers understand; what is as usual is not sent, as not all know all of it."""
    usual: dict[str, Any] = {
        "top_k": None,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": 0,
        "stop": [],
    }
    usual |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": None}
    given = {name: getattr(args, name) for name, value in usual.items() if getattr(args, name) != value}
    return {"temperature": args.temperature, **given}


class _Chat:
    def __init__(self, partner: Partner, system: str | None, waits: bool) -> None:
        """`waits`: on a server, so that Ctrl-C must break off what waits."""
        self._partner, self._system, self._waits = partner, system, waits
        self._turns: list[dict[str, str]] = []
        self._typed, self._clean = sys.stdin.isatty(), sys.stdout.isatty()

    def run(self) -> None:
        if self._typed:
            import readline  # noqa: F401  # so that a line can be edited

            _say(f"talking with {harmless(self._partner.name)}; /help says what else can be said.")
        while (line := self._read()) is not None:
            word, _, rest = line.strip().partition(" ")
            if word == "/quit":
                return
            try:
                if word.startswith("/"):
                    self._command(word, rest.strip())
                elif line.strip():
                    self._ask(line)
            except ShoalError as e:
                if not self._typed:  # nobody is there to go on
                    raise
                _say(harmless(str(e)))

    def _read(self) -> str | None:
        """A line, or None at the end."""
        while True:
            try:
                if self._typed:
                    return input("> ")
                line = sys.stdin.readline()
                return line.rstrip("\n") if line else None
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print()
                _say("/quit ends the chat.")
            except UnicodeDecodeError:
                _say("that is no UTF-8 text.")

    def _messages(self) -> list[dict[str, str]]:
        system = [] if not self._system else [{"role": "system", "content": self._system}]
        return [*system, *self._turns]

    def _ask(self, line: str) -> None:
        self._turns.append({"role": "user", "content": line})
        said = ""
        try:
            with _interrupts(self._waits) as stopped:
                for piece in self._partner.answer(self._messages(), stopped):
                    said += piece
                    print(harmless(piece) if self._clean else piece, end="", flush=True)
        except KeyboardInterrupt:
            pass
        except ShoalError:
            if not said:
                self._turns.pop()
            raise
        finally:
            if said:
                self._turns.append({"role": "assistant", "content": said})
                print(flush=True)
        ended = self._partner.ended()
        if not ended.whole:
            _say(f"the answer ended {harmless(ended.why)}.")
        elif not said:
            _say("the model says nothing.")

    def _command(self, word: str, rest: str) -> None:
        if word == "/reset":
            self._turns.clear()
            _say("the conversation is forgotten.")
        elif word == "/system":
            self._system = rest or None
            _say("the model is told that from now on." if rest else "there is no system message any more.")
        elif word == "/save":
            self._save(rest)
        elif word == "/help":
            print(HELP)
        else:
            _say(f"there is no {harmless(word)}; /help lists what there is.")

    def _save(self, name: str) -> None:
        if not name:
            _say("say where: /save FILE.")
            return
        try:
            with open(Path(name).expanduser(), "x", encoding="utf-8") as file:
                file.write(json.dumps({"messages": self._messages()}, ensure_ascii=False) + "\n")
            _say(f"saved in {name}.")
        except FileExistsError:
            _say(f"{name} is there already; name another file.")
        except (OSError, ValueError) as e:
            _say(f"{name} cannot be written ({getattr(e, 'strerror', None) or e}).")


@contextmanager
def _interrupts(at_once: bool) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed meanwhile. An engine is stopped between two tokens; what waits for a server is broken
    off `at_once`, and whoever presses it twice does not wait either."""
    asked = 0

    def take(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if at_once or asked > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, take)
    try:
        yield lambda: asked > 0
    finally:
        signal.signal(signal.SIGINT, before)


def _say(words: str) -> None:
    print(f"shoal: {words}", file=sys.stderr, flush=True)
