"""The training of one peer, as its node tells it: rounds of inner steps, parts handed in, records followed.

    begin ─► steps ─► end ─► part handed in ─► the next round's steps ─► …
                                     │                ▲
                                     └─► record ──────┘   the weights are moved between two steps

Nothing of a round waits for the network: the node says when it ends, and whatever comes meanwhile is done by the keeper
(`shoal.swarm.trainer.keeper`). What is known of other peers is theta alone; moments and residual are this peer's own.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.checkpoint.ledger import Fenced
from shoal.errors import NumericsError, ShoalError
from shoal.net.identity import canonical
from shoal.spec.duration import seconds
from shoal.spec.run import Run
from shoal.swarm.outer import state_files
from shoal.swarm.outer.outer import Outer
from shoal.swarm.outer.robust import Verdict, learned
from shoal.swarm.outer.rule import Rule
from shoal.swarm.trainer.keeper import Keeper, Work
from shoal.swarm.trainer.link import Link, Message
from shoal.swarm.trainer.mesh import Mesh
from shoal.swarm.trainer.round import Pace, Round
from shoal.swarm.trainer.samples import count
from shoal.train.training import Tell

IDLE_S, SAY_IDLE_S, STATUS_S = 0.05, 20.0, 1.0
MOST_SKIPPED = 100  # steps in a row whose loss is not finite
SCORED_WINDOWS = 16  # on which others' parts are tried


class Trainer:
    def __init__(
        self, run: Run, mesh: Mesh, link: Link, folder: Path, tell: Tell, told_to_stop: Callable[[], bool]
    ) -> None:
        self._run, self._mesh, self._link, self._folder, self._tell = run, mesh, link, folder, tell
        self._told_to_stop = told_to_stop
        self._rule = Rule.of(run.swarm)
        self._keeper: Keeper | None = None
        self._pace = Pace(run, mesh.readers)
        self._rounds: list[Round] = []  # the first one is being trained
        self._skipped = 0
        self._status = Status(link)
        self._logbook = Logbook(run, tell)
        self._due = Due(run, None)
        self._said_idle = time.monotonic()
        self._said_untried = False

    def train(self) -> None:
        """Until the node says stop, or is gone."""
        self._link.send("ready", params=self._mesh.weights.count)
        while not self._told_to_stop():
            self._now_and_then()
            message = self._link.next(0 if self._can_step() else IDLE_S)
            if message is not None:
                if message["kind"] == "stop":
                    break
                self._hear(message)
                continue
            self._follow()
            if self._can_step():
                self._step()
            else:
                self._idle()
            if self._rounds and self._over(self._rounds[0]):
                self._hand_in(self._rounds.pop(0))
        self._stop()

    # What the node says.

    def _hear(self, said: Message) -> None:
        match said["kind"]:
            case "fresh":
                self._due = Due(self._run, 0)
                self._mesh.fresh(int(said.get("seed", self._run.seed)))
                self._begin_from(Outer(self._mesh.read(), self._rule))
            case "load":
                folder = Path(said["path"])
                outer = state_files.load(folder, self._rule, self._mesh.weights.count, said.get("digest"))
                if self._keeper is not None:
                    self._keeper.settle()
                self._mesh.write(outer.theta)
                self._due = Due(self._run, None)  # the next record says which step that is
                self._begin_from(outer)
            case "begin":
                self._rounds.append(Round.of(said))
            case "more":
                for round in self._rounds:
                    if round.number == said["round"]:
                        round.samples.more(said["ranges"])
            case "end":
                for round in self._rounds:
                    round.ended = round.ended or round.number <= said["round"]
            case "apply":
                self.keeper.apply(said["record"], _name(said["record"]), said["parts"])
            case "merge":
                base, digest = Path(said["base"]), said.get("base_digest")
                self.keeper.merge(said["record"], _name(said["record"]), base, digest, said["branches"])
            case "returned":
                self.keeper.returned(int(said["round"]))
            case "save":
                self._save()
            case "score":
                self._score(int(said["round"]), said["parts"])
            case _:
                pass  # of a newer node

    @property
    def keeper(self) -> Keeper:
        if self._keeper is None:
            raise ShoalError("the node has asked for something before it has said what the weights are.")
        return self._keeper

    def _begin_from(self, outer: Outer) -> None:
        """Whatever was under way is gone; the node says again what is to be done."""
        self._rounds.clear()
        if self._keeper is None:
            self._keeper = Keeper(outer, self._folder, self._link.send, self._logbook.applied)
        else:
            self._keeper.take(outer)
        self._link.send("loaded", digest=outer.digest())

    # Steps.

    def _can_step(self) -> bool:
        if self._keeper is None or not self._rounds:
            return False
        round = self._rounds[0]
        return round.samples.left >= self._mesh.readers and not self._over(round)

    def _over(self, round: Round) -> bool:
        """By its time, with at least one step if there is something to take it with; or its samples are used up."""
        used_up = round.samples.left < self._mesh.readers
        return (round.ended and (round.work.steps > 0 or used_up)) or (used_up and round.work.steps > 0)

    def _step(self) -> None:
        round, readers = self._rounds[0], self._mesh.readers
        if round.began is None:
            self._pace.begins(round)
        began = time.perf_counter()
        batch = min(self._pace.batch(round), round.samples.left // readers * readers)
        ratio = self._pace.ratio(round)
        then = round.samples.peek(batch, skip=batch)
        ranges = round.samples.take(batch)
        step = self._mesh.step(ranges, then if count(then) % readers == 0 else [], ratio)
        seconds = time.perf_counter() - began
        round.took(step, seconds)
        self._pace.took(batch, seconds)
        self._status.took(self._pace.progress(round), step.loss, step.tokens, seconds, round.number)
        self._logbook.lr, self._logbook.grad_norm = step.lr, step.grad_norm
        self._skipped = 0 if step.taken else self._skipped + 1
        if self._skipped >= MOST_SKIPPED:
            raise NumericsError(f"the loss of {MOST_SKIPPED} steps in a row is not finite: lower the learning rate.")

    def _follow(self) -> None:
        if self._keeper is not None and (moves := self._keeper.moves()):
            self._mesh.add(moves)

    def _settled(self) -> Keeper:
        """The keeper, with nothing under way and all of it followed."""
        if moves := self.keeper.settle():
            self._mesh.add(moves)
        return self.keeper

    def _hand_in(self, round: Round) -> None:
        keeper = self._settled()
        weights = self._mesh.read()
        work = round.work
        if not np.isfinite(weights).all():
            self._tell("warning", text=f"round {round.number} has led to weights that are not finite; it is left out")
            self._mesh.write(keeper.outer.theta)
            self._mesh.calm()
            keeper.take(keeper.outer)
            weights, work = keeper.outer.theta.copy(), Work()
        self._pace.ends(round)
        self._logbook.handed_in(work)
        keeper.hand_in(round.number, weights, work)

    def _idle(self) -> None:
        self._status.idle()
        if time.monotonic() - self._said_idle > SAY_IDLE_S:
            self._said_idle = time.monotonic()
            self._mesh.idle()

    # Now and then.

    def _now_and_then(self) -> None:
        """What this peer's own run file asks for: a look at held-out data, a checkpoint."""
        evaluate, save = self._due.at(self._logbook.step, time.monotonic())
        if evaluate and self._logbook.step < self._run.steps:  # at the end it is evaluated anyway
            keeper = self._settled()
            own = self._mesh.read()
            self._mesh.write(keeper.outer.theta)
            self._mesh.evaluate(self._logbook.step)
            self._mesh.write(own)
        if save:
            self._checkpoint(self._settled())

    def _save(self) -> None:
        """For newcomers, and as a checkpoint of the run."""
        keeper = self._settled()
        keeper.save(self._folder / "snapshots" / f"{keeper.outer.round}")
        keeper.settle()
        if self._run.checkpoint.every == "auto":
            self._checkpoint(keeper)

    def _checkpoint(self, keeper: Keeper) -> None:
        step, begin = self._logbook.step, round(time.time(), 6)
        if not step or step == self._logbook.saved:
            return
        try:
            about = self._mesh.checkpoint(step, keeper.outer.theta)
        except (ShoalError, OSError) as e:
            if isinstance(e, Fenced):
                raise
            self._tell("checkpoint_failed", step=step, begin=begin, error=str(e))
            return
        self._logbook.saved = step
        self._tell("checkpoint", step=step, begin=begin, **about)

    def _score(self, round: int, parts: Mapping[str, str]) -> None:
        """What each part alone would do to the loss on some windows; below zero is good."""
        windows = self._tried(round)
        if not windows:
            self._link.send("scored", round=round, scores={})
            return
        keeper = self._settled()
        own, outer = self._mesh.read(), keeper.outer
        self._mesh.write(outer.theta)
        before, scores = self._mesh.loss(windows), {}
        where = self._rule.fragment(round, outer.count)
        for peer, path in parts.items():
            moved = outer.theta.copy()
            try:
                outer.codec.add(Path(path).read_bytes(), moved[where], -self._rule.lr)
            except ValueError:
                scores[peer] = 1e9  # it does not decode
                continue
            self._mesh.write(moved)
            scores[peer] = float(np.nan_to_num(self._mesh.loss(windows) - before, nan=1e9, posinf=1e9, neginf=-1e9))
        self._mesh.write(own)
        self._link.send("scored", round=round, scores=scores)

    def _tried(self, round: int) -> list[int]:
        """Windows that nobody trains on, others each round, so that nobody can prepare for them."""
        pool, readers = self._mesh.pool.size, self._mesh.readers
        count = min(max(1, SCORED_WINDOWS // readers), pool // readers) * readers
        if not count and not self._said_untried:
            self._said_untried = True
            why = "all of data.train is trained on and data.eval is empty; set data.eval"
            self._tell("warning", text=f"others' parts are not tried: {why}")
        chance = random.Random(f"{self._run.seed} {round} {time.time_ns()}")
        return sorted(chance.sample(range(pool), count))

    def _stop(self) -> None:
        """Hands in what there is, and leaves."""
        if self._keeper is None:
            return
        if self._rounds and self._rounds[0].work.steps:
            self._hand_in(self._rounds.pop(0))
        keeper = self._settled()
        self._checkpoint(keeper)
        if self._logbook.step >= self._run.steps:
            self._mesh.write(keeper.outer.theta)
            self._mesh.evaluate(self._logbook.step)
            self._tell("finished", step=self._logbook.step, digest=keeper.outer.digest())


class Due:
    """When a peer looks at held-out data and saves, by the steps of the whole swarm or by the clock."""

    def __init__(self, run: Run, step: int | None) -> None:
        """`step`: the one that training begins with; None: the first that is seen."""
        self._evaluate, self._save = run.eval.every if run.data.eval else 0, run.checkpoint.every
        self._last, self._saved_at = step, time.monotonic()

    def at(self, step: int, now: float) -> tuple[bool, bool]:
        """(evaluate, save), after this step."""
        last, self._last = self._last, step or self._last
        if last is None or step <= last:
            return False, False
        evaluate, save = _passes(self._evaluate, last, step), _passes(self._save, last, step)
        if isinstance(self._save, str) and self._save != "auto":
            save = now - self._saved_at >= seconds(self._save)
        if save:
            self._saved_at = now
        return evaluate, save


def _passes(every: int | str, last: int, step: int) -> bool:
    """Whether a multiple lies after `last` and not after `step`: a record of a swarm may be several steps."""
    return isinstance(every, int) and every > 0 and step // every > last // every


class Status:
    """For the node's view: where this peer stands, at most once a second."""

    def __init__(self, link: Link) -> None:
        self._link, self._since = link, time.monotonic()
        self._busy_s, self._tokens = 0.0, 0
        self._last: dict[str, Any] = {}

    def took(self, step: int, loss: float, tokens: int, seconds: float, round: int) -> None:
        self._busy_s, self._tokens = self._busy_s + seconds, self._tokens + tokens
        self._last = {"step": step, "loss": loss if np.isfinite(loss) else None, "round": round}
        self.idle()

    def idle(self) -> None:
        if (passed := time.monotonic() - self._since) < STATUS_S or not self._last:
            return
        busy = min(1.0, self._busy_s / passed)
        self._link.send("status", **self._last, tokens_per_s=round(self._tokens / passed, 1), busy=round(busy, 4))
        self._since, self._busy_s, self._tokens = time.monotonic(), 0.0, 0


class Logbook:
    """The journal's view of a swarm: a record that counts is a step of the run, or several."""

    def __init__(self, run: Run, tell: Tell) -> None:
        self._run, self._tell = run, tell
        self.step = 0  # of the run, that the records have reached
        self.saved = 0
        self.lr = self.grad_norm = 0.0
        self._compute_s = 0.0
        self._since = round(time.time(), 6)
        self._out: set[str] = set()

    def handed_in(self, work: Work) -> None:
        self._compute_s = work.seconds

    def applied(self, record: Mapping[str, Any], verdicts: list[Verdict], seconds: float) -> None:
        out = {v.peer for v in verdicts if v.out}
        for verdict in verdicts:
            if verdict.out and verdict.peer not in self._out:
                who = f"the part of peer {verdict.peer[:8]} in round {record['round']}"
                self._tell("warning", text=f"{who} is left out: {verdict.why}")
        self._out = out
        took = record.get("took") or []
        done = (record.get("ledger") or {}).get("done")
        step = min(int(done) // self._run.train.batch, self._run.steps) if done is not None else self.step + 1
        if step <= self.step or not took:
            return
        begin, self._since = self._since, round(time.time(), 6)
        weighed = [(float(t["loss"]), learned(t)) for t in took if t.get("loss") is not None]
        self._tell(
            "step",
            step=step,
            round=int(record["round"]),
            peers=len(took),
            begin=begin,
            position=0 if done is None else int(done),
            samples=sum(count(t.get("used") or []) for t in took),
            tokens=sum(int(t["tokens"]) for t in took),
            targets=sum(learned(t) for t in took),
            loss=sum(loss * n for loss, n in weighed) / max(1, sum(n for _, n in weighed)),
            grad_norm=self.grad_norm,
            lr=self.lr,
            time={"compute_s": self._compute_s, "exchange_s": seconds},
        )
        self.step = step


def _name(record: Mapping[str, Any]) -> str:
    return str(record.get("hash") or hashlib.sha256(canonical(record)).hexdigest())
