"""What stand-ins for a trainer have in common: the line to the node, the rounds that it gives out, the samples."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from shoal.swarm.ranges import union
from shoal.swarm.trainer.link import Gone, Link


class StandIn(ABC):
    def __init__(self) -> None:
        self.folder = Path(os.environ["SHOAL_SWARM_FOLDER"])
        self.link = Link.to(Path(os.environ["SHOAL_SWARM_SOCKET"]))
        self.rounds: list[dict[str, Any]] = []
        self.carried: list[list[int]] = []  # samples of parts that came back

    def say(self, **message: Any) -> None:
        self.link.send(**message)

    def hear(self) -> None:
        """All that was said meanwhile. It ends with the node, or when it is told to."""
        try:
            while (said := self.link.next(0)) is not None:
                if said["kind"] == "begin":
                    one = {"round": said["round"], "left": said["ranges"], "used": [], "steps": 0, "end": False}
                    self.rounds.append(one)
                elif said["kind"] == "end":
                    for one in self.rounds:
                        one["end"] = one["end"] or one["round"] <= said["round"]
                elif said["kind"] == "stop":
                    raise SystemExit(0)
                else:
                    self.told(said)
        except Gone:
            raise SystemExit(0) from None

    @abstractmethod
    def told(self, said: dict[str, Any]) -> None:
        """Of the weights: whatever is not about rounds."""

    def take(self, one: dict[str, Any], wanted: int) -> None:
        """Samples for a step."""
        while wanted and one["left"]:
            a, b = one["left"].pop(0)
            n = min(wanted, b - a)
            one["used"].append([a, a + n])
            wanted -= n
            if a + n < b:
                one["left"].insert(0, [a + n, b])
        one["steps"] += 1

    def is_over(self, one: dict[str, Any]) -> bool:
        """Its time, with a step at least if there are samples for one; or they are used up."""
        return bool(one["end"] and (one["steps"] or not one["left"])) or bool(not one["left"] and one["steps"])

    def used(self, one: dict[str, Any]) -> list[list[int]]:
        """Of a part, with what came back."""
        found = [list(r) for r in union(one["used"], self.carried)]
        self.carried = []
        return found
