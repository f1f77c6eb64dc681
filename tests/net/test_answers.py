"""An answer is read where it arrives: who makes no sense is named once, asked less, and left out for a while."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

import shoal
from shoal.net.answers import AGAIN_S, FORGIVEN_S, LEFT_OUT_S, MOST_BAD, Answers, BadAnswer
from shoal.net.api import Message, Refused
from shoal.net.seek import read_place
from shoal.swarm.blob_fetch import read_shown
from shoal.swarm.gossip import read_told
from shoal.swarm.messages import read_history
from shoal.swarm.snapshots import read_offered
from shoal.values import BadValue, whole
from tests.islands.nonsense import RAW, Bus, End, Made
from tests.net.ends import Journal

ME, ODD = "aa" * 32, "bb" * 32
NOT_READ = {"stages/outbox.py", "stages/peer.py"}  # what is answered there is that it has come, and no more


def number(answer: Message) -> int:
    return whole(answer.fields.get("n"))


class Told:
    """Asks `ODD`, which says what it is given."""

    def __init__(self) -> None:
        self.now, self.journal, self.bus, self.says = 0.0, Journal(), Bus(), Message("n", {"n": 5})
        self.answers = Answers(End(self.bus, ME), self.journal, clock=lambda: self.now)

    async def start(self) -> None:
        other = End(self.bus, ODD)

        async def say(peer: str, message: Message) -> Message:
            return self.says

        other.on("n", say)
        for end in (other, self.answers._endpoint):
            await end.start()

    async def ask(self) -> int:
        return await self.answers.ask(ODD, Message("n"), number)


def test_a_peer_whose_answers_make_no_sense_is_named_once_asked_less_and_forgiven() -> None:
    async def main() -> None:
        told = Told()
        await told.start()
        assert await told.ask() == 5
        told.says = Message("n", {"n": "five"})
        pauses = []
        for _ in range(MOST_BAD + 1):
            with pytest.raises(BadAnswer, match="makes no sense: 'five' where a whole number belongs"):
                await told.ask()
            began, asked = told.now, len(told.bus.asked)
            with pytest.raises(Refused, match="is not asked now"):
                await told.ask()
            assert len(told.bus.asked) == asked  # nothing was sent
            while told.answers.rests(ODD, "n"):
                told.now += 0.5
            pauses.append(told.now - began)
        assert pauses == sorted(pauses)
        assert pauses[0] == AGAIN_S[0]
        assert pauses[-1] == LEFT_OUT_S
        (named,) = told.journal.of("nonsense")
        assert named["peer"] == ODD
        assert "what bbbbbbbb says makes no sense (n: 'five'" in named["text"]
        told.now += FORGIVEN_S
        told.says = Message("n", {"n": 6})
        assert await told.ask() == 6
        assert not told.answers.left_out(ODD)

    asyncio.run(main())


def test_one_kind_of_bad_answers_does_not_keep_others_from_being_asked() -> None:
    async def main() -> None:
        told = Told()
        told.answers.bad(ODD, "m", "no number")
        assert told.answers.rests(ODD, "m")
        assert not told.answers.rests(ODD, "n")
        await told.start()
        assert await told.ask() == 5

    asyncio.run(main())


@pytest.mark.parametrize(
    "read",
    [read_offered, read_shown, read_told, read_place, lambda answer: read_history(answer.body, 100, 1 << 20)],
    ids=["snapshots", "blob", "roster", "punch", "chain"],
)
def test_every_reader_takes_nonsense_for_what_it_is(read) -> None:  # type: ignore[no-untyped-def]
    made, refused = Made(1), 0
    true = Message("x", {"have": "all", "size": 3, "time": 1.0, "same": True, "at": "1.2.3.4:5000"}, b'{"head": []}')
    for n in range(150):
        answer = Message("x", dict(true.fields), RAW[n]) if n < len(RAW) else made.of(true)
        try:
            read(answer)
        except BadValue:  # and nothing else
            refused += 1
    assert refused > 50


def test_no_answer_of_a_peer_is_read_anywhere_but_by_a_reader() -> None:
    folder = Path(shoal.__file__).parent
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "ask":
                of = ast.unparse(node.func.value)
                if of.endswith(("endpoint", "_ends", "carrier")):
                    found.add(str(file.relative_to(folder)))
    assert found - NOT_READ == {"net/answers.py", "net/endpoint.py", "swarm/enter.py"}
