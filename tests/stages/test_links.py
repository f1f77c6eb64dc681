"""The links of a pipeline are a swarm's: peers that have no address of their own meet at a relay."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import SpecError
from shoal.net.identity import Identity
from shoal.net.relay import Relay
from shoal.spec.run import Run
from shoal.stages.__main__ import peers_of, train
from tests.stages.toy import Toy, alone

RUN = {"name": "d", "data": {"train": "x"}, "train": {"steps": 3}, "swarm": {"stages": {"count": 2}}}
MICRO = 4


def test_peers_without_an_address_meet_at_a_relay(tmp_path: Path) -> None:
    run, keys = Run.model_validate(RUN), [Identity.new(), Identity.new()]
    toys = [Toy(stage, 2, MICRO, {}) for stage in (0, 1)]
    events: list[tuple[str, dict[str, Any]]] = []

    async def main() -> int:
        relay = Relay("127.0.0.1", 0)
        await relay.start()
        file = tmp_path / "peers.json"
        file.write_text(json.dumps([[{"id": key.id, "relays": [f"http://127.0.0.1:{relay.port}"]}] for key in keys]))
        layout, addresses = peers_of(file, run)
        assert not any(address.tcp for address in addresses.values())
        note = lambda kind, **fields: events.append((kind, fields))  # noqa: E731
        both = zip(keys, toys, strict=True)
        async with asyncio.timeout(600):
            await asyncio.gather(*(train(run, k, layout, addresses, toy, note, "", 0) for k, toy in both))
        carried = relay.counters.bytes
        await relay.close()
        return carried

    assert asyncio.run(main()) > 0
    weights, _ = alone(2, MICRO, 3)
    assert [toy.w for toy in toys] == pytest.approx(weights, abs=1e-12)
    assert len([kind for kind, _ in events if kind == "finished"]) == 2


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        ({"id": "a" * 64}, "without an address"),
        ({"id": "a" * 64, "relays": ["relay.example.org"]}, "not relay.example.org"),
        ({"id": "a" * 64, "relays": "http://a:1"}, "is no list of stages"),
    ],
)
def test_a_peer_that_cannot_be_found_is_refused(peer: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    file.write_text(json.dumps([[peer], [{"id": "b" * 64, "tcp": ["h:1"]}]]))
    with pytest.raises(SpecError, match=words):
        peers_of(file, Run.model_validate(RUN))
