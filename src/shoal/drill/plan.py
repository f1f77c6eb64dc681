"""What is broken and when: a function of the seed. What does not apply to a run is refused before anything starts."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.near import closest
from shoal.spec.run import Run

SCENARIOS = {
    "kill": "SIGKILL to a worker",
    "stop": "SIGSTOP to a worker; SIGCONT once it was noticed, or after --pause seconds",
    "slow": "a worker is stopped three quarters of the time, for --pause seconds",
    "oom": "a worker asks for memory until its own limit refuses it",
    "nan": "a batch whose gradient is not finite",
    "bitflip": "a bit of the newest checkpoint is flipped, in memory and on disk; then the workers are killed",
    "disk-full": "a save finds no space on the disk",
    "partition": "islands hear nothing from each other for --pause seconds",
    "coordinator": "SIGKILL to the supervisor; of islands, to it or to the first member",
    "preempt": "SIGTERM, and a scheduler that starts the run again; of islands, to one of them",
}
MIX = "mix"
STEPS_A_FAULT = 6  # fewer leave no room to recover before the next one
_FIRST, _LAST = 0.1, 0.8  # of the run: there is something to lose, and something left to do


@dataclass(frozen=True)
class Planned:
    kind: str
    step: int  # not before this one is committed
    moment: float  # … and this share of a step later
    pick: float  # chooses the victim among those there are then, from 0 to 1
    bit: int  # chooses the bit


def plan(scenario: str, run: Run, count: int | None, seed: int) -> list[Planned]:
    """The same for the same seed and run. `scenario` may name several, separated by commas: they take turns. Without a
    count each comes once."""
    return plan_of(scenario, SCENARIOS, lambda kind: _wrong(kind, run), run.steps, count, seed, "train.steps")


def plan_of(
    scenario: str,
    there: Collection[str],
    wrong: Callable[[str], str | None],
    steps: int,
    count: int | None,
    seed: int,
    of: str,
) -> list[Planned]:
    """Of so many steps; `there`: the scenarios that there are, `of`: by what the number of steps is known."""
    kinds = _kinds(scenario, there, wrong)
    named = 1 if scenario == MIX else len(kinds)
    count = named if count is None else count
    if count < named:
        raise UsageError(f"--count {count} leaves out {', '.join(kinds[count:])}: {named} scenarios are named.")
    if steps < STEPS_A_FAULT * count:
        faults, fewest = f"{count} fault{'s' * (count > 1)}", STEPS_A_FAULT * count
        said = f"train.steps={steps} is" if of == "train.steps" else f"{of} takes {steps} steps, which are"
        raise UsageError(f"{said} too few for {faults}: at least {fewest} are needed.")
    chance = random.Random(f"shoal drill {seed}")
    begin, length = steps * _FIRST, steps * (_LAST - _FIRST) / count
    planned = []
    for i in range(count):
        kind = chance.choice(kinds) if scenario == MIX else kinds[i % len(kinds)]
        step = max(1, round(begin + length * (i + chance.random() * 0.5)))
        planned.append(Planned(kind, step, chance.random(), chance.random(), chance.getrandbits(62)))
    return planned


def _kinds(scenario: str, there: Collection[str], wrong: Callable[[str], str | None]) -> list[str]:
    if scenario == MIX:
        return [kind for kind in there if wrong(kind) is None]
    kinds = [kind.strip() for kind in scenario.split(",")]
    if MIX in kinds:
        raise UsageError(f"{MIX} is all that apply, so no other scenario is named beside it.")
    for kind in kinds:
        if not kind:
            raise UsageError(f"--scenario '{scenario}' lacks a name; there are {', '.join([*there, MIX])}.")
        if kind not in there:
            near = closest(kind, [*there, MIX])
            hint = f"did you mean {near}?" if near else f"there are {', '.join([*there, MIX])}."
            raise UsageError(f"there is no scenario '{kind}'; {hint}")
        if said := wrong(kind):
            raise UsageError(f"{kind} does not apply to this run: {said}.")
    return kinds


def _wrong(kind: str, run: Run) -> str | None:
    """Why this run cannot be broken in that way."""
    if kind == "partition" and run.fleet.islands < 2:
        return "it has no islands; set fleet.islands=2 or more"
    if kind in ("bitflip", "disk-full") and run.checkpoint.every == 0:
        return "it saves nothing before its end; set checkpoint.every"
    if kind == "bitflip" and run.checkpoint.keep < 2:
        return "checkpoint.keep=1 leaves no other checkpoint to go on from; set checkpoint.keep=2 or more"
    if kind == "nan" and getattr(run.guard, "numerics", "stop") == "stop":
        return "guard.numerics is `stop`, so it would end there"
    if kind == "oom" and sys.platform != "linux":
        return "it needs Linux"
    return None


def environment(planned: list[Planned]) -> dict[str, str]:
    """For the worker processes: what can only be told to them when they start."""
    poisoned = [str(p.step) for p in planned if p.kind == "nan"]
    return {"SHOAL_POISON": f"nan:{','.join(poisoned)}"} if poisoned else {}
