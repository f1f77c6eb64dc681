"""A journal of islands, written by hand: steps of 1 s, and what the contract of docs/reference/journal.md says."""

from __future__ import annotations

from typing import Any


class Fleet:
    def __init__(self, islands: int = 3) -> None:
        self.records: list[dict[str, Any]] = []
        self.t, self.step, self.epoch, self.life = 1000.0, 0, 0, 1
        self.members = list(range(islands))

    def write(self, kind: str, **fields: Any) -> None:
        self.records.append({"v": 1, "kind": kind, "t": round(self.t, 6), **fields})

    def open(self) -> Fleet:
        self.write("open", session=0, pid=1, host="box", argv=[], resumed=False)
        for island in self.members:
            self.write("island", island=island, start=0, agent=10 + island, pids=[100 + island])
        self.t += 5
        self.write("start", attempt=1, step=0, world=1, total=100)
        return self.begin_epoch()

    def begin_epoch(
        self, left: dict[str, str] | None = None, joined: tuple[int, ...] = (), noticed: float = 0
    ) -> Fleet:
        self.epoch += 1
        self.members = sorted({*self.members, *joined} - {int(i) for i in left or ()})
        fields = {"base": self.step, "members": self.members, "left": left or {}, "joined": list(joined)}
        self.write("epoch", number=self.epoch, life=self.life, step=self.step, noticed=noticed or self.t, **fields)
        return self

    def take(self, n: int = 1, seconds: float = 1.0, begin: float | None = None) -> Fleet:
        for _ in range(n):
            begin = self.t if begin is None else begin
            self.t += seconds
            self.step += 1
            self.tell_step(self.step, begin)
            begin = None
        return self

    def tell_step(self, step: int, begin: float) -> None:
        self.write(
            "step",
            attempt=self.life,
            step=step,
            begin=begin,
            position=(step - 1) * 8,
            samples=8,
            tokens=64,
            loss=1.0,
            time={"data_s": 0.0},
            epoch=self.epoch,
            islands=self.members,
        )

    def failure(self, island: int, cause: str = "killed", at: float | None = None) -> Fleet:
        action = f"restart island {island} in 1 s; the others go on"
        self.write("failure", island=island, start=0, rank=0, cause=cause, evidence="ended", at=at, action=action)
        return self

    def close(self) -> Fleet:
        self.write("close", session=0, status="done", exit_code=0, reason="")
        return self
