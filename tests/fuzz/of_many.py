"""`shoal generate`: files of prompts, and what an earlier start has left."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.json_values import encoded, mutated
from tests.fuzz.of_data import emptied
from tests.fuzz.raw_bytes import damaged
from tests.fuzz.reader import Finding, Folder, Target, reader

LINES: list[dict[str, Any]] = [
    {"id": "a", "prompt": "The whale"},
    {"id": 7, "tokens": [1, 2, 3], "sampling": {"max_tokens": 5, "temperature": 0.5, "top_k": 3, "stop": ["x", "y"]}},
    {"messages": [{"role": "user", "content": "why?"}], "sampling": {"seed": 1, "stop": "\n", "ignore_stop": True}},
]


@reader("prompt-lines", "generate.many.item", quick=300, share=300)
def prompt_lines(folder: Path) -> Target:
    """A line is an item that can be asked, a blank, or refused in one sentence."""
    from shoal.generate.many.item import item_of
    from shoal.generate.request import Sampling
    from shoal.values import BadValue

    def generate(rng: Random) -> tuple[bool, bytes]:
        line = encoded(mutated(rng, rng.choice(LINES))) if rng.random() < 0.8 else encoded(rng.choice(LINES))
        return rng.random() < 0.8, damaged(rng, line) if rng.random() < 0.3 else line

    def read(case: tuple[bool, bytes]) -> object:
        item = item_of(case[1], 1, case[0])
        if item is None:
            return None
        sampling = item.sampled(Sampling(), 0)
        if sum(one is not None for one in (item.prompt, item.messages, item.tokens)) != 1:
            raise Finding("an item that asks for nothing, or for two things")
        json.dumps({"id": item.id, "text": item.prompt}, ensure_ascii=False).encode()  # as it is written again
        return sampling

    return Target(generate, read, (BadValue,))


@reader("kept-answers", "generate.many.kept", quick=60, share=20)
def kept_answers(folder: Path) -> Target:
    """Whatever stands there: refused, or each line of the input is answered once in the end."""
    from shoal.errors import ShoalError
    from shoal.generate.many.kept import Kept

    asked, lines = {"input": "ab", "part": "0 of 1", "seed": 0}, range(3, 9)
    good = Folder(
        {
            "out.begun.json": json.dumps(asked).encode(),
            "out.under-way": b"".join(b'{"line": %d, "text": "a"}\n' % n for n in (5, 4, 9)),
        }
    )

    def generate(rng: Random) -> Folder:
        case, name = Folder(good), rng.choice(tuple(good))
        if name == "out.begun.json" and rng.random() < 0.7:
            case[name] = encoded(mutated(rng, asked))
        elif rng.random() < 0.9:
            case[name] = damaged(rng, case[name])
        else:
            del case[name]
        if rng.random() < 0.05:
            case["out"] = b"{}\n"
        return case

    def read(case: Folder) -> None:
        there = emptied(folder / "kept")
        case.write(there)
        with Kept(there / "out", asked, lines) as kept:
            if kept.finished:
                return
            for line in lines:
                if line not in kept:
                    kept.add(line, {"line": line + 1, "text": "b"})
            kept.finish()
        found = [json.loads(line)["line"] for line in (there / "out").read_bytes().splitlines()]
        if found != [line + 1 for line in lines]:
            raise Finding("not each line once, in their order")

    return Target(generate, read, (ShoalError,))
