"""One process of an island: builds its part, enters the fleet, trains, and leaves with an exit code."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from shoal.data.skips import Skips
from shoal.devices import cores
from shoal.islands.fleet import Fleet, Turn
from shoal.islands.loop import train
from shoal.islands.replica import Island
from shoal.islands.shard_feed import ShardFeed
from shoal.journal.journal import Journal, Record
from shoal.journal.pulse import SILENT, Pulse
from shoal.journal.reading import EVERY, told
from shoal.journal.rundir import RunDir
from shoal.parallel.inner import Inner
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.train import collect, takeover
from shoal.train.clock import timeline_of
from shoal.train.numerics import Past
from shoal.train.parts import Parts, evaluator, prepare
from shoal.train.poison import Poison
from shoal.train.state import digest

HOST = "SHOAL_FLEET_HOST"  # the address of this machine that the other islands can reach


def work(run_dir: RunDir, run: Run, place: Place, stop: Callable[[], bool], pulse: Pulse = SILENT) -> None:
    torch.set_num_threads(cores.threads(int(run.resources.threads)))
    parts = prepare(run_dir, run, place, pulse)
    island, host = int(os.environ["SHOAL_ISLAND"]), os.environ.get(HOST, "127.0.0.1")
    inner = Inner(place.rank, place.world)
    fleet = Fleet(run_dir.path / "fleet", island, run.fleet.islands, int(run.fleet.shards), inner, host)
    scribe = Scribe(run_dir, fleet, parts)
    feed = ShardFeed(
        parts.windows,
        parts.order,
        run.train.batch,
        run.shard,
        place.at["dp"],
        place.sizes.dp,
        int(run.mesh.micro_batch),
    )

    def reload(at_most: int | None) -> int:
        step = takeover.restore(run, run_dir, parts.state, scribe.tell, at_most)
        if step is None:
            _as_at_the_beginning(parts)
        return step or 0

    t = Island(
        run,
        place,
        parts.model,
        parts.optimizers,
        parts.state,
        feed,
        fleet,
        scribe.tell,
        stop,
        evaluator(run, run_dir, place, parts.state, scribe.tell),
        reload,
        lambda step: Past.of_journal(run_dir.journal_file, step),
        lambda step: takeover.saves_of_first(run, run_dir, place, parts.state, step, scribe.tell),
        scribe.took_part,
        lambda step: takeover.good_before(run, run_dir, step),
        pulse,
        Poison.here(place.rank),
        timeline_of(place.device, parts.model.decoders),
    )
    scribe.recent = t.recent
    try:
        with collect.by_hand():
            train(t)
        scribe.tell("finished", step=run.steps, digest=digest(parts.model, place))
    finally:
        feed.close()
        if t.saves:
            t.saves.close()
        fleet.close()


def _as_at_the_beginning(parts: Parts) -> None:
    for decoder in parts.model.decoders:
        decoder.init_weights(parts.run.seed)
    parts.load_weights()
    parts.optimizers.begin()
    parts.own.begin()
    parts.state.skips.spans = Skips([batch, batch] for batch in parts.run.data.skip).spans
    parts.model.spread()


class Scribe:
    """Writes the fleet's half of the journal, on the first island alone."""

    def __init__(self, run_dir: RunDir, fleet: Fleet, parts: Parts) -> None:
        self._run_dir, self._fleet, self._parts = run_dir, fleet, parts
        self._journal: Journal | None = None
        self._epoch = self._life = 0
        self.recent: Any = ()

    def tell(self, kind: str, **fields: Any) -> None:
        if self._journal is not None and self._fleet.is_first and self._fleet.epoch is not None:
            self._journal.note(kind, attempt=self._fleet.epoch.life - 1, **fields)

    def took_part(self, step: int, turn: Turn) -> None:
        """A step begins: if that is in a new epoch, the first island says so."""
        epoch = turn.epoch
        if epoch.number == self._epoch:
            return
        new_life = epoch.life != self._life
        self._epoch, self._life = epoch.number, epoch.life
        if self._parts.place.rank or not self._fleet.is_first:
            self._close()
            return
        if self._journal is None or new_life:
            self._journal = self._journal or Journal(self._run_dir.journal_file)
            self._make_up_for_the_one_before(step)
        numbers = {key: int(key.split("-")[0]) for key in (*epoch.keys, *epoch.left)}
        self.tell(
            "epoch",
            number=epoch.number,
            life=epoch.life,
            step=step,
            members=[numbers[key] for key in epoch.keys],
            left={str(numbers[key]): why for key, why in epoch.left.items()},
            joined=[numbers[key] for key in epoch.joined],
            noticed=round(epoch.noticed, 6) or None,
        )

    def _close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _make_up_for_the_one_before(self, step: int) -> None:
        """Whoever was first may have died before it wrote what was decided."""
        life = self._fleet.epoch.life if self._fleet.epoch else 1
        known = told(self._run_dir.journal_file)
        said = [record for _, record in known.others(EVERY)]
        self._tell_how_the_last_life_ended(life, {r["begin"] for r in said if r["kind"] == "rewind"})
        said = [r for r in said if r.get("attempt") == life - 1]
        if not any(r["kind"] == "start" for r in said):
            fleet, place, saved = self._parts.run.fleet, self._parts.place, step or None
            world = place.world * fleet.islands
            about = self._parts.about()
            self.tell("start", step=step, world=world, islands=fleet.islands, resumed_from=saved, **about)
        subjects = {_subject(r["kind"], r) for r in said}
        taken = known.column("step")[known.column("attempt") == life - 1]
        for kind, record in self.recent:
            if kind == "step" and record["step"] in taken:
                continue
            if kind != "rewind" and _subject(kind, record) not in subjects:
                self.tell(kind, **record)

    def _tell_how_the_last_life_ended(self, life: int, known: set[float]) -> None:
        assert self._journal is not None
        for kind, record in self.recent:
            if kind == "rewind" and record["begin"] not in known:
                self._journal.note(kind, attempt=life - 2, **record)


def _subject(kind: str, record: Record) -> tuple[str, object]:
    """By which two records of one life are about the same thing."""
    return kind, record.get("batch", record.get("step", record.get("text")))
