"""Peers of a cut model that come by invitation: the words of `shoal swarm` as typed, real nodes over loopback in this
process, and toys that compute (or what a test gives them)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shoal.cli.main import main
from shoal.errors import ShoalError
from shoal.journal.rundir import RunDir
from shoal.net.identity import Identity
from shoal.spec import load
from shoal.spec.run import Run
from shoal.stages.node import Made, live
from shoal.swarm.charter import Charter
from shoal.swarm.config import NodeConfig, folder_of
from shoal.swarm.start import Log
from tests.stages.toy import Toy
from tests.swarm.test_enter import run_file

HERE = ["--tcp-only", "--listen", "127.0.0.1"]
LIMIT_S = 240
Make = Callable[[str, int], Made]  # the work of a peer, by its name and stage


class Cut:
    """A swarm whose model is cut into two stages of toys; the first of its peers is called `founder`."""

    def __init__(
        self,
        folder: Path,
        peers: int,
        steps: int = 6,
        micro_batches: int = 4,
        file: Path | None = None,
        crawl_after: int | None = None,
    ) -> None:
        """`crawl_after`: from that step on all are slow until `free` is set, so that something can happen before the
        last one."""
        self.folder, self.micro_batches, self.crawl_after = folder, micro_batches, crawl_after
        self.free = threading.Event()
        self.disks: dict[str, dict[int, float]] = {}
        self.toys: dict[str, Toy] = {}
        self.make: Make = self._toy
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self.file = file or run_file(folder / "home")
        toys = ["resources.processes=1", "data.eval=[]", f"train.steps={steps}", "checkpoint.every=3"]
        cut = [*([] if file else toys), "swarm.stages.count=2", f"swarm.peers={peers}", "swarm.silent=2 s"]
        assert self.word("create", str(self.file), "--no-start", "--name", "founder", *HERE, *cut) == 0

    def word(self, *words: str, who: str = "founder") -> int:
        """Of `shoal swarm`."""
        return main(["swarm", *words, "--workspace", str(self.folder / who)])

    def config(self, who: str) -> NodeConfig:
        [run] = (self.folder / who / "runs").iterdir()
        return NodeConfig.load(folder_of(RunDir(run)))

    def id(self, who: str) -> str:
        return Identity.load(self.config(who).identity_file).id

    @property
    def charter(self) -> Charter:
        return Charter.load(self.config("founder").charter_file)

    def line(self) -> str:
        """As it was kept; with `@` it is an invitation."""
        [file] = self.config("founder").invitations.iterdir()
        return f"@{file}"

    async def join(self, who: str, *more: str) -> int:
        """Enters by the invitation; nothing is started."""
        words = ("join", self.line(), "--no-start", "--yes", "--name", who, *HERE, *more)
        return await asyncio.to_thread(self.word, *words, who=who)

    def start(self, who: str) -> None:
        config = self.config(who)
        run: Run = load(config.run).run
        tell = lambda kind, **fields: self.events.append((who, kind, fields))  # noqa: E731
        log = Log(config, lambda text: None)
        self.tasks[who] = asyncio.create_task(live(config, run, lambda stage: self.make(who, stage), tell, log))

    def _toy(self, who: str, stage: int) -> Made:
        toy = self.toys[who] = Toy(stage, 2, self.micro_batches, self.disks.setdefault(who, {}))

        def crawl(what: str, m: int) -> None:
            if self.crawl_after is not None and toy.step >= self.crawl_after:
                self.free.wait(0.1)

        toy.before = crawl
        return toy, ""

    async def kill(self, who: str) -> None:
        task = self.tasks.pop(who)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def ended(self, *who: str) -> dict[str, ShoalError | None]:
        """How each has ended; None: with the last step."""
        async with asyncio.timeout(LIMIT_S):
            found = await asyncio.gather(*(self.tasks.pop(name) for name in who), return_exceptions=True)
        for one in found:
            assert one is None or isinstance(one, ShoalError), one
        return dict(zip(who, found, strict=True))  # type: ignore[arg-type]

    async def until(self, true: Callable[[], Any]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not true():
                for task in self.tasks.values():
                    if task.done():
                        task.result()
                await asyncio.sleep(0.01)

    def seen(self, kind: str, who: str | None = None) -> list[dict[str, Any]]:
        return [fields for name, k, fields in self.events if k == kind and who in (None, name)]

    def said(self, words: str) -> bool:
        return any(words in fields.get("text", "") for _, _, fields in self.events)

    @asynccontextmanager
    async def running(self, *others: str) -> AsyncIterator[None]:
        """The founder, and these, who enter one after the other; all are killed in the end."""
        self.start("founder")
        try:
            for who in others:
                assert await self.join(who) == 0
                self.start(who)
            yield
        finally:
            for who in list(self.tasks):
                await self.kill(who)
