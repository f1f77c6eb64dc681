"""Where a peer is seen from: a public endpoint that tells its callers their address, and how to ask it.

A peer behind a NAT cannot know the address that others must send to. iroh punches holes by itself once it does
(`Endpoint.add_external_addr`), so one question to any public host is enough; it has to come from the endpoint's own
socket, so this is an iroh endpoint too.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from shoal.errors import SetupError, needs_extra
from shoal.net.identity import Identity

try:
    import iroh
except ImportError as e:
    raise needs_extra("iroh", "swarm", "A relay") from e

PROTOCOL = b"shoal/where/1"
QUESTION = b"where"
MOST_ANSWER = 64
MOST_CALLERS = 1024
ANSWER_S = 10.0
AGAIN_S = 0.1


class Rendezvous:
    """Answers at a fixed UDP port."""

    def __init__(self, bind: str) -> None:
        self._bind = bind
        self._endpoint: iroh.Endpoint | None = None
        self._task: asyncio.Task[None] | None = None
        self._callers: set[asyncio.Task[None]] = set()
        self._identity = Identity.new()
        self.id = self._identity.id

    async def start(self) -> None:
        # iroh's package has one loop for the whole process, which is the first one's if nobody says so.
        iroh.iroh_ffi.uniffi_set_event_loop(asyncio.get_running_loop())  # type: ignore[arg-type]  # any loop does
        options = iroh.EndpointOptions(
            preset=iroh.preset_minimal(),
            relay_mode=iroh.RelayMode.disabled(),
            bind_addr=self._bind,
            alpns=[PROTOCOL],
            secret_key=self._identity.secret,
        )
        try:
            self._endpoint = await iroh.Endpoint.bind(options)
        except iroh.IrohError as e:
            raise SetupError(f"UDP port {self._bind} cannot be used ({_said(e)}); choose another with --port.") from e
        self._task = asyncio.create_task(self._accept(self._endpoint))

    async def close(self) -> None:
        if self._endpoint is not None:
            with suppress(iroh.IrohError):
                await self._endpoint.close()
            self._endpoint = None
        if self._task is not None:  # it ends by itself then; one that is cancelled keeps iroh's socket open
            with suppress(TimeoutError, iroh.IrohError):
                async with asyncio.timeout(1):
                    await self._task
        for task in self._callers:
            task.cancel()

    async def _accept(self, endpoint: iroh.Endpoint) -> None:
        while True:
            try:
                incoming = await endpoint.accept_next()
            except iroh.IrohError:  # of one caller; whoever comes next is answered
                await asyncio.sleep(AGAIN_S)
                if self._endpoint is None:
                    return
                continue
            if incoming is None:
                return
            if len(self._callers) >= MOST_CALLERS:
                with suppress(iroh.IrohError):
                    await incoming.refuse()
                continue
            task = asyncio.create_task(self._answer(incoming))
            self._callers.add(task)
            task.add_done_callback(self._callers.discard)

    async def _answer(self, incoming: iroh.Incoming) -> None:
        """As often as the caller asks: its address may change, and asking keeps its NAT's mapping alive."""
        with suppress(iroh.IrohError, TimeoutError):
            seen = getattr(await incoming.remote_addr(), "addr", "")  # it has one unless it came through a relay
            async with asyncio.timeout(ANSWER_S):
                connection = await (await incoming.accept()).connect()
            while True:
                stream = await connection.accept_bi()
                async with asyncio.timeout(ANSWER_S):
                    if await stream.recv().read_to_end(len(QUESTION)) != QUESTION:
                        return
                    await stream.send().write_all(seen.encode())
                    await stream.send().finish()


async def where(connection: iroh.Connection) -> str:
    """This endpoint's ip:port, as the rendezvous at the other end sees it."""
    stream = await connection.open_bi()
    await stream.send().write_all(QUESTION)
    await stream.send().finish()
    return bytes(await stream.recv().read_to_end(MOST_ANSWER)).decode("ascii")


async def call(endpoint: iroh.Endpoint, peer: str, address: str) -> iroh.Connection:
    """To the rendezvous of a relay, as its /info names it. The connection ends when it is let go of."""
    return await endpoint.connect(iroh.EndpointAddr(iroh.EndpointId.from_string(peer), None, [address]), PROTOCOL)


def _said(e: iroh.IrohError) -> str:
    return str(e.message() if hasattr(e, "message") else e).splitlines()[0]
