"""What a scheduler starts on every node: `python -m shoal.launch.agent RUN.yaml --workspace DIR --processes N`.

Who it is comes from the environment, since that is what all schedulers can set: SHOAL_NODE (0, 1, …), SHOAL_NODES,
SHOAL_HEAD (host:port of node 0), SHOAL_TOKEN (hex; the agents of a job know each other by it), SHOAL_JOB (the
scheduler's name of the job), and SHOAL_NODES_HERE where several nodes are one machine. Node 0 supervises the run, the
others do as it says; all leave with the same exit code.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import wire
from shoal.decide.auto import decide
from shoal.decide.checks import local_inputs, trainable
from shoal.decide.length import measured
from shoal.decide.load import load
from shoal.decide.script import decide_script
from shoal.devices import visible_gpus
from shoal.errors import (
    DONE,
    TOLD_TO_STOP,
    TRANSIENT,
    WRONG_ENVIRONMENT,
    WRONG_USAGE,
    ShoalError,
    SpecError,
    UsageError,
)
from shoal.guard.begin import create, say_changed, write_spec, writing
from shoal.guard.crew import Alone, Crew, Decision
from shoal.guard.history import History, continues
from shoal.guard.nodes.crew import Nodes
from shoal.guard.nodes.follower import Follower
from shoal.guard.nodes.head import Head
from shoal.guard.supervise import supervise
from shoal.journal.rundir import MOST_SPEC, RunDir, workspace
from shoal.launch import fabric
from shoal.launch.bundle import Bundle
from shoal.launch.holding import hold
from shoal.leaving import leave_at_once
from shoal.plain_file import is_plain, read_plain
from shoal.spec import Run
from shoal.spec.begun import as_begun, differences
from shoal.streams import steady
from shoal.train.prolong import prolonged


@dataclass(frozen=True)
class Who:
    """This agent among those of its job."""

    node: int
    nodes: int
    head: tuple[str, int] | None
    token: bytes
    job: str | None
    together: int = 1  # nodes that are really one machine, whose cores and memory they share

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Who:
        node, nodes = _number(env, "SHOAL_NODE", 0), _number(env, "SHOAL_NODES", 1)
        if not 0 <= node < nodes:
            raise UsageError(f"SHOAL_NODE is {node} and SHOAL_NODES {nodes}; nodes are counted from 0.")
        job = env.get("SHOAL_JOB") or None
        if nodes == 1:
            return cls(0, 1, None, b"", job)
        if missing := [name for name in ("SHOAL_HEAD", "SHOAL_TOKEN") if not env.get(name)]:
            raise UsageError(f"an agent of {nodes} nodes needs {' and '.join(missing)} in its environment.")
        try:
            head, token = wire.address_of(env["SHOAL_HEAD"]), bytes.fromhex(env["SHOAL_TOKEN"])
        except ValueError:
            raise UsageError("SHOAL_HEAD must be host:port and SHOAL_TOKEN hexadecimal.") from None
        return cls(node, nodes, head, token, job, max(1, _number(env, "SHOAL_NODES_HERE", 1)))


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    if not text.isdecimal():
        raise UsageError(f"{name} is '{text}', which is not a number.")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.launch.agent", description=__doc__)
    parser.add_argument("file", metavar="RUN.yaml")
    parser.add_argument("--workspace", metavar="DIR")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="worker processes of this node")
    parser.add_argument("--min-nodes", type=int, metavar="N", help="it starts and goes on with as few as these")
    args = parser.parse_args(argv)
    try:
        folder = workspace(args.workspace)
        if _is_batch(Path(args.file)):
            from shoal.launch.batch_node import run_node

            return run_node(Path(args.file), folder, os.environ)
        who = Who.of(os.environ)
        if who.nodes > who.together and visible_gpus() and (slow := fabric.problem()):
            print(f"shoal: {slow}.", file=sys.stderr, flush=True)
        if who.node > 0:
            assert who.head is not None
            return Follower(who.head, who.token, who.node, args.processes, folder).run()
        return first(who, Path(args.file), folder, args.processes, args.min_nodes or who.nodes)
    except ShoalError as e:
        print(f"shoal: {e}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        return TOLD_TO_STOP
    except OSError as e:
        print(f"shoal: the system said: {e.strerror or e} ({e.filename or 'no file'}).", file=sys.stderr)
        return TRANSIENT
    except Exception:
        traceback.print_exc()
        return TRANSIENT


def _is_batch(file: Path) -> bool:
    """Of a run file as Shoal writes it, without parsing all of it. (Where there is none, whoever reads it says so.)"""
    return is_plain(file) and re.search(rb"^batch:$", read_plain(file, MOST_SPEC), re.MULTILINE) is not None


def first(who: Who, file: Path, folder: Path, processes: int, least: int) -> int:
    """Node 0's: the run begins, or goes on where it stopped, as `shoal train` of the same file would."""
    head = Head(who.head[1], who.token, who.nodes) if who.head is not None else None
    try:
        return _supervised(who, head, file, folder, processes, least)
    except BaseException as e:
        if head is not None:  # nobody else would tell the others that it is over
            head.close(e.exit_code if isinstance(e, ShoalError) else TRANSIENT, str(e) or type(e).__name__)
        raise


def _supervised(who: Who, head: Head | None, file: Path, folder: Path, processes: int, least: int) -> int:
    asked = load(file).run
    if asked.script is not None:
        return _script(who, placed(asked, file.parent / Bundle.CODE, processes), folder)
    trainable(asked)
    run_dir = RunDir.of(asked.name, folder)
    begun = run_dir.exists()
    history = History.of(run_dir)
    local_inputs(asked, begun=history.saved_step > 0)
    before = load(run_dir.spec_file).run if begun else None
    length = measured(as_begun(before, asked) if before else asked, run_dir.workspace, history.step)
    asked = prolonged(before, length.run, history.step) if before else length.run

    def laid_over(world: int) -> tuple[Run, tuple[Decision, ...]]:
        decided = decide(_for(asked, world), run_dir.workspace, world, processes * who.together)
        return decided.run, (*length.decisions, *decided.decisions)

    with ExitStack() as held:
        with writing(run_dir):
            hold(held, run_dir, who.job)
        world = processes * who.nodes // asked.fleet.islands  # of each island
        run, decisions = laid_over(world)
        near = file.parent / Bundle.CODE
        with writing(run_dir):
            if not begun:
                create(run_dir, run, near)
        if begun:
            say_changed(run, run_dir, near)
            if (code := _go_on(run_dir, asked)) is not None:
                if head is not None:
                    head.close(code)
                return code
            with writing(run_dir):
                write_spec(run_dir, run)  # the workers read it: a longer run is longer for them too
        crew: Crew = Alone(world)
        if head is not None and who.head is not None:
            crew = Nodes(run_dir, head, who.head[0], processes, who.nodes, least, laid_over)
        said = () if begun else decisions
        return supervise(run_dir, run, world, decisions=said, held=True, crew=crew, job=who.job)


def placed(asked: Run, near: Path, processes: int) -> Run:
    """A run that is a script as it is on this node: the copy that came with the run, if one did."""
    script, code = asked.script, asked.launch.code
    assert script is not None
    changed: dict[str, Any] = {"processes": processes}
    if (
        code is not None
        and (path := Path(script.path)).is_relative_to(code)
        and (near / path.relative_to(code)).exists()
    ):
        changed["path"] = str(near / path.relative_to(code))
        changed["folder"] = script.folder or str(near)
    return asked.model_copy(update={"script": script.model_copy(update=changed)})


def _script(who: Who, asked: Run, folder: Path) -> int:
    """Somebody's, on this node alone. Its own exit codes mean nothing to a scheduler: such an end may be retried."""
    trainable(asked, "script")
    run_dir = RunDir.of(asked.name, folder)
    with ExitStack() as held:
        with writing(run_dir):
            hold(held, run_dir, who.job)
        begun, decided = run_dir.exists(), decide_script(asked)
        if begun and History.of(run_dir).finished:
            print(f"run {run_dir.name} is finished: the script has ended.")
            return DONE
        with writing(run_dir):
            (write_spec if begun else create)(run_dir, decided.run)
        said = () if begun else decided.decisions
        code = supervise(run_dir, decided.run, decided.world, decisions=said, held=True, job=who.job)
    return code if code in (DONE, WRONG_USAGE, TRANSIENT, WRONG_ENVIRONMENT, TOLD_TO_STOP) else TRANSIENT


def _for(asked: Run, world: int) -> Run:
    """The run as it was asked for, over so many processes: with fewer nodes there are fewer."""
    return asked.model_copy(update={"resources": asked.resources.model_copy(update={"processes": world})})


def _go_on(run_dir: RunDir, asked: Run) -> int | None:
    """Refuses another history under the same name; the exit code when there is nothing left to do."""
    differ = [d for d in differences(load(run_dir.spec_file).run, asked, auto_is_equal=True) if not d.safe]
    if differ:
        named = "; ".join(map(str, differ[:6]))
        raise SpecError(f"run '{asked.name}' exists with another spec: {named}. Give this one another name (name=…).")
    history = History.of(run_dir)
    if history.finished and asked.steps <= history.step:
        print(f"run {run_dir.name} is finished: {history.step} steps.")
        return 0
    print(continues(run_dir, asked.steps))
    return None


if __name__ == "__main__":
    steady()
    leave_at_once(main())
