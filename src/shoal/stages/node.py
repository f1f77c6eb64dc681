"""The node of a peer whose swarm trains a model that is cut over peers: one process that talks and computes.

Links, roster, gossip, data and commands are any swarm's. What is its own: it waits for the signed layout (`seats`),
then takes the steps of its stage (`training`). There are no rounds, so there is no history that all agree on: steps are
exact, siblings compare digests, and each peer's journal is the run's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from shoal.decide.checks import trainable
from shoal.decide.load import load
from shoal.errors import ShoalError, Stopped, TransientError
from shoal.net.answers import Answers
from shoal.net.api import Event
from shoal.net.identity import Identity
from shoal.net.tasks import Tasks, words
from shoal.spec.duration import seconds
from shoal.spec.run import Run
from shoal.stages.layers import StageLayers
from shoal.stages.seats import Seats
from shoal.stages.states import saves_at
from shoal.stages.training import End, Told, journaled, peer_of, take_steps
from shoal.stages.view import View
from shoal.stages.work import Work
from shoal.swarm.blobs import Blobs
from shoal.swarm.charter import Charter
from shoal.swarm.config import NodeConfig
from shoal.swarm.control import alone, forget_commands
from shoal.swarm.enter import endpoint_of
from shoal.swarm.gossip import Gossip
from shoal.swarm.roster import Roster
from shoal.swarm.session_journal import session
from shoal.swarm.start import Log, hear_commands, write_status

SHOW_S = 1.0
Made = tuple[Work, str]  # and the fingerprint of all that peers must agree on


def run_node(config: NodeConfig) -> int:
    """The exit code; raises what has ended it."""
    with alone(config):
        forget_commands(config)
        run = load(config.run).run
        trainable(run, "cut")
        saves_at(run)  # refuses what cannot be saved, before anybody counts on this peer
        threads, device = run.resources.threads, run.resources.device
        torch.set_num_threads(1 if threads == "auto" else threads)
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        folder = config.run_dir.path
        with (
            session(config.run_dir.journal_file, done="all steps are taken") as life,
            journaled(folder, run.steps) as tell,
        ):

            def make(stage: int) -> Made:
                work = StageLayers(run, stage, folder, torch.device("cuda" if cuda else "cpu"), tell)
                return work, work.fingerprint

            asyncio.run(live(config, run, make, tell, Log(config, life.warn)))
    return 0


async def live(config: NodeConfig, run: Run, make: Callable[[int], Made], tell: Event, event: Log) -> None:
    """`tell`: of the steps, for the journal of the run; `event`: of peers and links. `make`: the work of a stage."""
    end = End()
    roster = Roster.load(config.roster_file, Identity.load(config.identity_file), event)
    charter = Charter.load(config.charter_file)
    endpoint = endpoint_of(config, roster, event, seconds(run.swarm.silent))
    await endpoint.start()

    def broke(what: str, e: Exception) -> None:
        said = f"{what} of this peer's node has failed ({words(e)}); start it again, it goes on where it was."
        end.fail(e if isinstance(e, ShoalError) else TransientError(said))

    tasks = Tasks(event, broke)
    try:
        answers = Answers(endpoint, event, roster.name)
        gossip = Gossip(roster, endpoint, event, charter=charter.to_bytes(), answers=answers)
        Blobs(config.blobs, endpoint, event, answers)  # for those who come without the data
        seats = Seats(config, run, charter, roster, endpoint, answers, tell)
        view = View(run, roster, endpoint, seats, event.recent)
        tasks.keep("the gossip", gossip.run)
        tasks.keep("the ear for commands", lambda: hear_commands(config, roster, end.stop, end.fail))
        tasks.keep("the status", lambda: _show_for_ever(config, view))
        try:
            layout, stage = await end.unless_told(seats.settled())
            print(f"this peer holds stage {stage + 1} of {len(layout.stages)}", flush=True)
            work, fingerprint = await asyncio.to_thread(make, stage)
            peer = view.peer = peer_of(run, endpoint, (seats.layout or layout).stages, work, tell, fingerprint)
            peer.late = layout.late(endpoint.id)
            peer.puzzled = lambda by: tasks.spawn(seats.learn_from(by))
            seats.grown = lambda layout: peer.settle(layout.stages)
            tasks.keep("the look for newcomers", seats.follow)
            await take_steps(peer, end)
        except Told:
            raise end.error or Stopped("stopped before the first step; started again, it goes on.") from None
        finally:
            await tasks.close()
            write_status(config, view.status())
    except Stopped:
        await gossip.leave()
        raise
    finally:
        await endpoint.close()


async def _show_for_ever(config: NodeConfig, view: View) -> None:
    """For those who look."""
    while True:
        write_status(config, view.status())
        await asyncio.sleep(SHOW_S)
