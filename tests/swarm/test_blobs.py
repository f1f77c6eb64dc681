from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shoal.errors import DataError
from shoal.net.api import Message, PeerId
from shoal.net.endpoint import Peers
from shoal.swarm import blob_folder
from shoal.swarm.blob_fetch import KIND
from shoal.swarm.blob_store import PIECE, Store
from shoal.swarm.blobs import Blobs, NotFound, WrongSize
from tests.net.ends import Journal, end, until


class Peer:
    """An endpoint with blobs. A bad source with `slow_s` (each piece), `uplink_s` (one after the other), or `lies`."""

    def __init__(self, folder: Path) -> None:
        self.endpoint: Peers
        self.endpoint, self.journal = end()
        self.blobs = Blobs(folder, self.endpoint, self.journal)
        self.slow_s, self.uplink_s, self.lies, self.served = 0.0, 0.0, False, 0
        self._uplink = asyncio.Lock()
        self.endpoint.on(KIND, self._serve, 0)

    async def _serve(self, peer: PeerId, message: Message) -> Message | None:
        said = await self.blobs._serve(peer, message)
        assert said is not None
        if "piece" in message.fields and len(said.body):
            self.served += 1
            await asyncio.sleep(self.slow_s)
            async with self._uplink:
                await asyncio.sleep(self.uplink_s)
            if self.lies:
                return Message(KIND, said.fields, bytes(len(said.body)))
        return said


@asynccontextmanager
async def peers(folder: Path, count: int) -> AsyncIterator[list[Peer]]:
    made = [Peer(folder / f"peer-{i}") for i in range(count)]
    for one in made:
        await one.endpoint.start()
    for one in made:
        for other in made:
            if other is not one:
                one.endpoint.know(other.endpoint.id, other.endpoint.address())
    try:
        yield made
    finally:
        for one in made:
            await one.blobs.close()
            await one.endpoint.close()


def file_of(folder: Path, size: int, seed: int = 0) -> Path:
    file = folder / f"data-{size}-{seed}"
    file.write_bytes(random.Random(seed).randbytes(size))
    return file


def ids(*many: Peer) -> list[PeerId]:
    return [one.endpoint.id for one in many]


def same(a: Path, b: Path) -> bool:
    return hashlib.sha256(a.read_bytes()).digest() == hashlib.sha256(b.read_bytes()).digest()


@pytest.mark.parametrize("size", [0, 1, PIECE, 3 * PIECE + 17])
def test_a_blob_comes_from_several_sources_at_once(tmp_path: Path, size: int) -> None:
    async def play() -> None:
        async with peers(tmp_path, 3) as (a, b, c):
            file = file_of(tmp_path, size)
            name, length = await a.blobs.add(file)
            assert (await b.blobs.add(file)) == (name, length)
            path = await c.blobs.fetch(name, length, ids(a, b))
            assert same(path, file)
            assert c.blobs.path(name) == path
            assert await c.blobs.fetch(name, length, []) == path  # it is here

    asyncio.run(play())


def test_a_source_that_is_killed_half_way_costs_no_more_than_its_pieces(tmp_path: Path) -> None:
    async def play() -> None:
        async with peers(tmp_path, 3) as (a, b, c):
            file = file_of(tmp_path, 24 * PIECE)
            name, length = await a.blobs.add(file)
            await b.blobs.add(file)
            a.slow_s = b.slow_s = 0.05
            fetch = asyncio.create_task(c.blobs.fetch(name, length, ids(a, b)))
            await until(lambda: a.served >= 3)
            await a.endpoint.close()
            assert same(await asyncio.wait_for(fetch, 200), file)

    asyncio.run(play())


def test_a_source_that_hangs_does_not_hold_up_the_rest(tmp_path: Path) -> None:
    async def play() -> None:
        async with peers(tmp_path, 3) as (a, b, c):
            file = file_of(tmp_path, 8 * PIECE)
            name, length = await a.blobs.add(file)
            await b.blobs.add(file)
            a.slow_s = 3600.0
            assert same(await c.blobs.fetch(name, length, ids(a, b)), file)  # long before the hour is over

    asyncio.run(play())


def test_a_lying_source_is_named_and_its_bytes_are_not_kept(tmp_path: Path) -> None:
    async def play() -> None:
        async with peers(tmp_path, 3) as (liar, honest, c):
            file = file_of(tmp_path, 8 * PIECE)
            name, length = await liar.blobs.add(file)
            await honest.blobs.add(file)
            liar.lies, honest.slow_s = True, 0.02
            assert same(await c.blobs.fetch(name, length, ids(liar, honest)), file)
            [told] = c.journal.of("refused")
            assert told["peer"] == liar.endpoint.id
            assert c.blobs.liars[liar.endpoint.id] == 1
            # Where nobody is honest nothing is believed.
            other = file_of(tmp_path, 2 * PIECE, seed=1)
            name, length = await liar.blobs.add(other)
            with pytest.raises(NotFound):
                await c.blobs.fetch(name, length, ids(liar))
            assert c.blobs.path(name) is None

    asyncio.run(play())


def test_a_wrong_length_is_the_fault_of_who_announced_it(tmp_path: Path) -> None:
    async def play() -> None:
        async with peers(tmp_path, 2) as (a, c):
            name, length = await a.blobs.add(file_of(tmp_path, PIECE))
            for wrong in (length + 1, length * 2, 0):
                with pytest.raises(WrongSize if wrong else NotFound):
                    await c.blobs.fetch(name, wrong, ids(a), patience_s=0.5)
            assert not c.blobs.liars

    asyncio.run(play())


def test_a_slow_source_brings_little(tmp_path: Path) -> None:
    async def play() -> None:
        async with peers(tmp_path, 3) as (slow, quick, c):
            file = file_of(tmp_path, 30 * PIECE)
            name, length = await slow.blobs.add(file)
            await quick.blobs.add(file)
            slow.slow_s = 2.5
            assert same(await c.blobs.fetch(name, length, ids(slow, quick)), file)
            assert slow.served <= 4 < quick.served

    asyncio.run(play())


def test_those_who_fetch_the_same_blob_help_each_other(tmp_path: Path) -> None:
    async def play() -> None:
        async with peers(tmp_path, 4) as (a, *others):
            file = file_of(tmp_path, 16 * PIECE)
            name, length = await a.blobs.add(file)
            a.uplink_s = 0.2  # 40 Mbit/s: 9.6 s for three copies
            everybody = ids(a, *others)
            got = await asyncio.gather(*(o.blobs.fetch(name, length, everybody) for o in others))
            assert all(same(path, file) for path in got)
            assert sum(a.blobs.served.by_peer.values()) < 2.2 * length
            assert all(o.served for o in others)

    asyncio.run(play())


def test_what_has_come_is_kept_over_a_restart(tmp_path: Path) -> None:
    async def play() -> None:
        async with peers(tmp_path, 2) as (a, c):
            file = file_of(tmp_path, 16 * PIECE + 5)
            name, length = await a.blobs.add(file)
            a.slow_s = 0.05
            fetch = asyncio.create_task(c.blobs.fetch(name, length, ids(a)))
            await until(lambda: a.served >= 8)
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)
            await c.blobs.close()
            a.served = 0
            again = Blobs(tmp_path / "peer-1", c.endpoint, c.journal)
            assert same(await again.fetch(name, length, ids(a)), file)
            assert a.served < 17  # some of the pieces had come, however few a busy machine has written

    asyncio.run(play())


def test_several_who_wait_for_one_blob_share_the_fetch_and_one_may_give_up(tmp_path: Path) -> None:
    async def play() -> None:
        async with peers(tmp_path, 2) as (a, c):
            file = file_of(tmp_path, 6 * PIECE)
            name, length = await a.blobs.add(file)
            a.slow_s = 0.05
            first, second = (asyncio.create_task(c.blobs.fetch(name, length, ids(a))) for _ in range(2))
            await until(lambda: a.served >= 1)
            first.cancel()
            assert same(await second, file)
            assert a.served == 6

    asyncio.run(play())


def test_a_source_may_get_it_later(tmp_path: Path) -> None:
    async def play() -> None:
        async with peers(tmp_path, 2) as (a, c):
            file = file_of(tmp_path, PIECE)
            name, length = Store(tmp_path / "elsewhere").add_file(file)
            with pytest.raises(NotFound):
                await c.blobs.fetch(name, length, ids(a), patience_s=0.3)
            fetch = asyncio.create_task(c.blobs.fetch(name, length, ids(a)))
            await asyncio.sleep(0.2)
            await a.blobs.add(file)
            assert same(await asyncio.wait_for(fetch, 100), file)

    asyncio.run(play())


def test_urgent_pieces_go_first(tmp_path: Path) -> None:
    async def play() -> None:
        async with peers(tmp_path, 3) as (a, round_, newcomer):
            large, part = file_of(tmp_path, 12 * PIECE), file_of(tmp_path, 8 * PIECE, seed=1)
            (large_name, _), (part_name, _) = await a.blobs.add(large), await a.blobs.add(part)
            order: list[str] = []
            urgent = asyncio.create_task(round_.blobs.fetch(part_name, 8 * PIECE, ids(a), urgent=True))
            urgent.add_done_callback(lambda _: order.append("part"))
            bulk = asyncio.create_task(newcomer.blobs.fetch(large_name, 12 * PIECE, ids(a)))
            bulk.add_done_callback(lambda _: order.append("large"))
            await asyncio.gather(urgent, bulk)
            assert order == ["part", "large"]

    asyncio.run(play())


def test_what_is_being_added_is_not_deleted_before_anybody_can_name_it(tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_bytes(b"a part")
    other.write_bytes(b"of no use")

    async def story() -> None:
        async with peers(tmp_path, 1) as [one]:
            gone, _ = await one.blobs.add(other)
            adding = asyncio.create_task(one.blobs.add(file))
            while not adding.done():
                await asyncio.sleep(0)
                # Its file may be there already; the task is told only after others had their turn.
                assert adding.done() or one.blobs.retain(()) == 0
            name, _ = adding.result()
            assert one.blobs.store.path(name) is not None
            one.blobs.retain({name})
            assert one.blobs.store.path(gone) is None

    asyncio.run(story())


def test_a_folder_travels_as_one_and_retain_keeps_its_files(tmp_path: Path) -> None:
    async def play() -> None:
        async with peers(tmp_path, 2) as (a, c):
            folder = tmp_path / "data"
            (folder / "deep").mkdir(parents=True)
            (folder / "index.json").write_text("{}")
            (folder / "deep" / "shard").write_bytes(os.urandom(2 * PIECE + 1))
            (folder / "empty").touch()
            name, length = await a.blobs.add(folder, outside=True)
            into = await c.blobs.fetch_folder(name, length, ids(a), tmp_path / "fetched", most_bytes=1 << 30)
            for file in ("index.json", "deep/shard", "empty"):
                assert same(into / file, folder / file)
            junk, _ = c.blobs.store.add_bytes(b"junk")
            c.blobs.retain({name})
            assert c.blobs.path(junk) is None
            assert len(c.blobs.store.names()) == 4
            # What lies outside and has changed is not offered any more.
            (folder / "index.json").write_text("[]")
            assert a.blobs.path(Store(tmp_path / "x").add_bytes(b"{}")[0]) is None

    asyncio.run(play())


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a//b", "a/./b", "", "a\\..\\b", "c:x", "a\nb", "x" * 2000])
def test_a_manifest_cannot_write_outside_its_folder(path: str) -> None:
    text = blob_folder.manifest([blob_folder.File(path, 1, "ab" * 32)])
    with pytest.raises(DataError):
        blob_folder.parse(text)


def test_odd_questions_are_answered_with_nothing(tmp_path: Path) -> None:
    async def play() -> None:
        async with peers(tmp_path, 2) as (a, c):
            name, _ = await a.blobs.add(file_of(tmp_path, PIECE))
            for fields in (
                {},
                {"name": "../../etc/passwd", "piece": 0},
                {"name": name, "piece": 7},
                {"name": name, "piece": -1},
                {"name": name, "piece": 1 << 60},
                {"name": ["x"], "list": True},
            ):
                said = await c.endpoint.ask(a.endpoint.id, Message(KIND, fields))
                assert len(said.body) == 0

    asyncio.run(play())


def test_journal_of_a_fetch_names_who_brought_what(tmp_path: Path) -> None:
    async def play() -> Journal:
        async with peers(tmp_path, 2) as (a, c):
            name, length = await a.blobs.add(file_of(tmp_path, 2 * PIECE))
            await c.blobs.fetch(name, length, ids(a))
            assert c.journal.of("blob")[0]["brought"] == {a.endpoint.id: length}
            assert a.blobs.served.bytes == length
            return c.journal

    asyncio.run(play())
