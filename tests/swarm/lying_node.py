"""A peer's real node that is changed to lie, in a process of its own, once the swarm has gone on for some rounds.

python -m tests.swarm.lying_node LIE WORKSPACE RUN
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from shoal.cli.main import main
from shoal.net.api import Message
from shoal.swarm import node
from shoal.swarm.round_record import Record, proposal_text
from shoal.swarm.talk import Talk
from shoal.swarm.world import Out

HONEST_ROUNDS = 3


class TwoProposals(Talk):
    """As the leader it proposes to one member another record than to the rest."""

    def send(self, outs: list[Out]) -> None:
        first = next((out for out in outs if out.kind == "propose"), None)
        if first is not None and self._node.chain.head.round >= HONEST_ROUNDS:
            outs = [self._other(out) if out is first else out for out in outs]
        super().send(outs)

    def _other(self, out: Out) -> Out:
        said = Record.of(out.fields["record"])
        record = replace(said, time=said.time + 1)
        text = proposal_text(self._node.chain.swarm, record.parent, out.fields["term"], record.hash)
        signed = {"record": record.body(), "signature": self._node.sign(text)}
        return replace(out, fields={**out.fields, **signed})


class HugeNumber(Talk):
    """In its pulse, which everybody's node reads."""

    def message(self, kind: str, fields: dict[str, Any]) -> Message:
        if kind == "pulse" and self._node.chain.head.round >= HONEST_ROUNDS:
            fields = {**fields, "status": {**fields["status"], "loss": 10**400}}
        return super().message(kind, fields)


LIES: dict[str, type[Talk]] = {"proposals": TwoProposals, "range": HugeNumber}

if __name__ == "__main__":
    lie, workspace, run = sys.argv[1:]
    node.Talk = LIES[lie]  # type: ignore[misc]
    sys.exit(main(["swarm", "join", run, "--workspace", workspace]))
