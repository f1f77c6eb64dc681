"""The trainer process of a peer, and the socket on which node and trainer talk: JSON, a line a message."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.net.tasks import Tasks
from shoal.swarm.trainer_words import Word, read
from shoal.values import MOST_BYTES, BadValue

LINE_BYTES = MOST_BYTES
LEAVE_S = 60.0  # a trainer that was told to stop has so long

Said = dict[str, Any]


class Trainer:
    """Starts the process, and again if it dies. `heard` gets each word; `odd` is told why a line is none; `gone` gets
    the exit code. All in the same loop."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        heard: Callable[[Word], None],
        odd: Callable[[str], None],
        gone: Callable[[int], None],
        starts: Callable[[], Mapping[str, str]],
        tasks: Tasks,
    ) -> None:
        """`starts`: told of each start; what goes into its environment."""
        self._command, self._folder, self._starts = list(command), folder, starts
        self._heard, self._odd, self._gone = heard, odd, gone
        self._tasks = tasks
        self._room = Path(tempfile.mkdtemp(prefix="shoal-swarm-"))  # a socket's path is short
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Also after its end."""
        if self._server is None:
            path = str(self._room / "socket")
            self._server = await asyncio.start_unix_server(self._talk, path, limit=LINE_BYTES)
            os.chmod(path, 0o600)
        env = os.environ | {
            "SHOAL_SWARM_SOCKET": str(self._room / "socket"),
            "SHOAL_SWARM_FOLDER": str(self._folder),
            **self._starts(),
        }
        # A group of its own: Ctrl-C is the node's, which tells the trainer in its own words.
        self._process = await asyncio.create_subprocess_exec(*self._command, env=env, start_new_session=True)
        self._watch = self._tasks.spawn(self._wait(self._process), "the watch over the trainer")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def say(self, message: Said) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    async def stop(self) -> None:
        """Lets it save and leave; then it has to."""
        self.say({"kind": "stop"})
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await process.wait()
            self.kill()
            await process.wait()
        await self.close()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None:
            self._server.close()
        if self._writer is not None:
            self._writer.close()
        shutil.rmtree(self._room, ignore_errors=True)

    async def _wait(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has left behind
        self._gone(code)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._tasks.spawn(self._listen(reader, writer), "the ear for the trainer")

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readline()
        except ValueError:
            raise BadValue(f"a line of more than {LINE_BYTES:,} bytes") from None

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        try:
            while line := await self._line(reader):
                if (word := read(line)) is not None:
                    self._heard(word)
        except OSError:
            pass  # it is gone; whoever watches it says so
        except BadValue as e:
            self._odd(str(e))
        finally:
            if self._writer is writer:
                self._writer = None
            writer.close()
