"""Who is not who it says, changes, repeats or moves what was said, gets nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shoal.net import secure
from shoal.net.api import Refused
from shoal.net.frames import BadFrame
from shoal.net.identity import Identity
from shoal.net.pipe import Broken, Greeting
from shoal.net.secure import Cipher, Proven, SecurePipe, answer, dial
from tests.net.ends import drain

Change = Callable[[int, bytes], bytes]  # which write it was, what was written: what arrives


class Wire:
    """A writer whose bytes arrive at the other's reader, after somebody in between had them in hand."""

    def __init__(self, to: asyncio.StreamReader, change: Change = lambda i, data: data) -> None:
        self._to, self._change, self.written = to, change, list[bytes]()

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))
        self._to.feed_data(self._change(len(self.written) - 1, bytes(data)))

    async def drain(self) -> None: ...

    def close(self) -> None:
        self._to.feed_eof()


GREETING = Greeting("boot", "link", False, proof=b"invited")


async def meet(
    a: Identity, b: Identity, expects: str = "", from_a: Change = lambda i, d: d, from_b: Change = lambda i, d: d
) -> tuple[Proven, Proven | None, Wire, Wire]:
    to_a, to_b = asyncio.StreamReader(), asyncio.StreamReader()
    wire_a, wire_b = Wire(to_b, from_a), Wire(to_a, from_b)
    welcome = lambda peer, said: GREETING if said.proof == b"invited" else "not invited"  # noqa: E731

    async def listen() -> Proven | None:
        try:
            return await answer(to_b, wire_b, b, welcome)  # type: ignore[arg-type]  # what it uses of a writer
        except Broken:
            to_a.feed_eof()
            raise

    async with asyncio.timeout(60):
        listener = asyncio.ensure_future(listen())
        try:
            dialed = await dial(to_a, wire_a, a, expects or b.id, GREETING)  # type: ignore[arg-type]
        except BaseException:
            to_b.feed_eof()
            await asyncio.gather(listener, return_exceptions=True)
            raise
        return dialed, await listener, wire_a, wire_b


def test_both_know_who_the_other_is_and_share_keys() -> None:
    async def main() -> None:
        a, b = Identity.new(), Identity.new()
        dialed, accepted, *_ = await meet(a, b)
        assert accepted is not None
        assert (dialed.peer, accepted.peer) == (b.id, a.id)
        assert accepted.greeting.proof == b"invited"
        for out, into in ((dialed, accepted), (accepted, dialed)):
            assert into.receives.open(out.sends.seal(b"hi", b"4"), b"4") == b"hi"

    asyncio.run(main())


def test_another_key_than_expected_is_refused() -> None:
    with pytest.raises(Broken, match="another peer"):
        asyncio.run(meet(Identity.new(), Identity.new(), expects=Identity.new().id))


@pytest.mark.parametrize(("side", "write", "at"), [(s, w, p) for s in "ab" for w in (0, 1) for p in (1, 16, 40, -1)])
def test_one_changed_bit_of_the_handshake_ends_it(side: str, write: int, at: int) -> None:
    def flip(i: int, data: bytes) -> bytes:
        if i != write:
            return data
        changed = bytearray(data)
        changed[at] ^= 1
        return bytes(changed)

    async def main() -> None:
        if side == "a":
            await meet(Identity.new(), Identity.new(), from_a=flip)
        else:
            await meet(Identity.new(), Identity.new(), from_b=flip)

    with pytest.raises((Broken, TimeoutError)):
        asyncio.run(main())


def test_a_replayed_handshake_is_refused() -> None:
    async def main() -> None:
        a, b = Identity.new(), Identity.new()
        *_, recorded, _ = await meet(a, b)
        reader, back = asyncio.StreamReader(), asyncio.StreamReader()
        for said in recorded.written:
            reader.feed_data(said)
        admitted: list[str] = []

        def welcome(peer: str, said: Greeting) -> Greeting:
            admitted.append(peer)
            return GREETING

        with pytest.raises(Broken):
            await answer(reader, Wire(back), b, welcome)  # type: ignore[arg-type]
        assert not admitted

    asyncio.run(main())


def test_who_is_not_welcome_hears_why_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.net.test_secure.GREETING", Greeting("boot", "link", False, proof=b"stolen"))
    with pytest.raises(Refused, match="not invited"):
        asyncio.run(meet(Identity.new(), Identity.new()))


def test_an_own_greeting_sent_back_proves_nothing() -> None:
    """Whoever reflects what a peer says cannot pass for that peer."""
    me = Identity.new()

    async def main() -> None:
        reader = asyncio.StreamReader()
        mirror = Wire(reader)
        async with asyncio.timeout(1):
            await dial(reader, mirror, me, me.id, GREETING)  # type: ignore[arg-type]

    with pytest.raises((Broken, TimeoutError)):
        asyncio.run(main())


def test_records_that_are_repeated_moved_or_changed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        out = asyncio.StreamReader()
        sent = Wire(out)
        pipe = SecurePipe(out, sent, Cipher(b"k" * 32), Cipher(b"k" * 32), 100, "")  # type: ignore[arg-type]
        for text in (b"one", b"two"):
            await pipe.send([text])
        assert [await pipe.receive(), await pipe.receive()] == [b"one", b"two"]
        one, two = sent.written
        changed = bytearray(one)
        changed[-1] ^= 1
        for wrong in ([one, one], [two, one], [bytes(changed)], [(200).to_bytes(4, "big")], [bytes(4)]):
            reader = asyncio.StreamReader()
            pipe = SecurePipe(reader, sent, Cipher(b"k" * 32), Cipher(b"k" * 32), 100, "")  # type: ignore[arg-type]
            for data in wrong:
                reader.feed_data(data)
            with pytest.raises(BadFrame):
                await drain(pipe)

    asyncio.run(main())


def test_keys_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure, "REKEY", 3)
    a, b = Cipher(b"k" * 32), Cipher(b"k" * 32)
    sealed = [a.seal(b"same", b"") for _ in range(10)]
    assert len(set(sealed)) == 10
    assert [b.open(s, b"") for s in sealed] == [b"same"] * 10
