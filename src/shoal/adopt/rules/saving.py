"""Whether a training can go on as it was: what its checkpoints hold, whether they are whole, and the seed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.adopt.code import Unit, argument, constant
from shoal.adopt.finding import Finding
from shoal.adopt.state import MODEL, OPTIMIZER, POSITION, RNG, SCALER, SCHEDULE, Held, Reader, by_name
from shoal.adopt.training import Training

_SEEDS = re.compile(
    r"(torch(\.random)?\.manual_seed|torch\.cuda\.manual_seed(_all)?|(transformers|accelerate)(\.\w+)*\.set_seed"
    r"|(lightning|pytorch_lightning|lightning_fabric)(\.\w+)*\.seed_everything)$"
)
_CLOCK = re.compile(
    r"(time\.(time|time_ns|perf_counter\w*|monotonic\w*)|os\.(urandom|getpid)|datetime\..*now|secrets\.\w+|uuid\.\w+"
    r"|random\.(randint|random|randrange|getrandbits)|torch\.(seed|initial_seed))$"
)
_DRAWS = re.compile(
    r"(torch\.(rand|randn|randint|randperm|rand_like|randn_like|bernoulli|multinomial|normal)"
    r"|(numpy)\.random\.(?!seed|get_state|set_state)\w+|random\.(?!seed|getstate|setstate|Random$)\w+"
    r"|torch\.nn\.(Alpha)?Dropout\w*|torch\.nn\.functional\.dropout\w*|torchvision\.transforms(\.v2)?\.Random\w+"
    r"|torch\.utils\.data(\.\w+)*\.(RandomSampler|WeightedRandomSampler))$"
)
_OTHER_SAVES = re.compile(r"(json|yaml|pickle|safetensors\.torch|numpy)\.(dump|dumps|safe_dump|save_file|savez?)$")
_MOVES = ("os.replace", "os.rename", "shutil.move", "os.link", "os.renames")
_SKIPPING = re.compile(r"skip|fast_forward|(start|first|resume)_?(batch|index|idx|step|iter)|consumed|seen|already")
_SETS_UP = re.compile(r"seed|determin|reproduc|set_?up|init_(env|exp|run|train)")


@dataclass(frozen=True)
class Checkpoint:
    """What the script saves to go on from, all of its saves together."""

    call: ast.Call
    unit: Unit
    held: Held
    perhaps: frozenset[str]  # what else may be saved, in a file beside it


def checkpoint(t: Training) -> Checkpoint | None:
    """None where there is none, or none that anybody means to go on from."""
    reader, whole, best = Reader(t), Held(), None
    if t.shared_saves or "engine" in t.helpers or not t.steps:
        return None
    if any(True for _ in t.methods("save_state", "register_for_checkpointing")):
        return None
    for call, unit in t.saves:
        value = argument(call, "obj", 0)
        assert value is not None
        held = reader.held(value)
        whole.add(held)
        if best is None or len(held.parts) > len(best.held.parts):
            best = Checkpoint(call, unit, held, frozenset())
    perhaps = set[str]()
    for call, _, full in t.calls:
        if _OTHER_SAVES.match(full) and call.args:
            beside = reader.held(call.args[0])
            perhaps |= beside.parts | ({POSITION, RNG} if beside.open else set())
    if best is None or whole.open or MODEL not in whole.parts:
        return None
    return Checkpoint(best.call, best.unit, whole, frozenset(perhaps)) if _is_meant(t, whole) else None


def _is_meant(t: Training, held: Held) -> bool:
    """To be gone on from: more than a model is in it, or the script loads what it calls a checkpoint."""
    if held.parts - {MODEL}:
        return bool(t.loads) or OPTIMIZER in held.parts or POSITION in held.parts
    paths = {ast.dump(path) for call, _ in t.saves if (path := argument(call, "f", 1)) is not None}
    for call, unit in t.loads:
        if call.args and ast.dump(call.args[0]) in paths:
            return True
        words = [t.code.reads(n) or str(constant(n) or "") for a in call.args for n in ast.walk(a)]
        words += [unit.name, t.target(call)]
        for guard in t.guards.around(call):
            words += [t.code.reads(n) for n in ast.walk(guard.test)]
        if any(re.search(r"resume|restore|restart|snapshot|continue", word.lower()) for word in words if word):
            return True
    return False


def checkpoints(t: Training) -> Iterator[Finding]:
    found = checkpoint(t)
    if found is not None:
        yield from _missing(t, found)
        yield from _not_restored(t, found)
        yield from _order_lost(t)


def _missing(t: Training, found: Checkpoint) -> Iterator[Finding]:
    held = found.held.parts | found.perhaps

    def missing(rule: str, reason: str) -> Finding:
        return Finding(rule, found.unit.module.shown, t.line(found.call), reason)

    if OPTIMIZER not in held:
        yield missing(
            "checkpoint-optimizer", "the checkpoint has no state of the optimizer: its moments begin at zero again."
        )
    elif forgotten := _forgotten(t, found.held):
        yield missing("checkpoint-optimizer", f"the checkpoint has no state of the optimizer `{forgotten}`.")
    if SCHEDULE not in held and (schedules := t.made("schedule")) and not _rewound(t, schedules):
        yield missing(
            "checkpoint-schedule", "the checkpoint has no state of the learning rate's schedule: it begins anew."
        )
    if SCALER not in held and any(_is_on(t, call) for call, _ in t.made("scaler")):
        yield missing("checkpoint-scaler", "the checkpoint has no state of the gradient scaler: its scale begins anew.")
    if POSITION not in held and not _told_by_name(t, found):
        yield missing("checkpoint-position", "the checkpoint does not say how far the training was.")
    if RNG not in held and _draws(t) and not _reseeds(t):
        yield missing(
            "checkpoint-rng",
            "the checkpoint has no state of the random numbers: order, dropout and augmentation go on differently.",
        )


def _forgotten(t: Training, held: Held) -> str | None:
    """One of several optimizers, where the names tell."""
    made = {name for _, _, name in t.optimizers if name}
    saved = held.names & made
    if len(made) < 2 or not saved or any(not name for _, _, name in t.optimizers):
        return None
    stepped = {step.optimizer for step in t.steps}
    return next((name for name in sorted(made - saved) if name in stepped), None)


def _rewound(t: Training, schedules: list[tuple[ast.Call, Unit]]) -> bool:
    """Made with the step that it goes on from, or stepped up to it."""
    if any(argument(call, "last_epoch") is not None for call, _ in schedules):
        return True
    return any("schedule" in t.kinds.of(target) and call.args for call, _, target in t.methods("step"))


def _is_on(t: Training, call: ast.Call) -> bool:
    """Not switched off, and not only where a type is float16, which the script may not use."""
    enabled = argument(call, "enabled")
    asked = [guard.test for guard in t.guards.around(call)] + ([enabled] if enabled is not None else [])
    if any("float16" in ast.unparse(test) or "half" in ast.unparse(test) for test in asked):
        return False
    return enabled is None or constant(enabled) is True or isinstance(enabled, ast.Name | ast.Attribute)


def _told_by_name(t: Training, found: Checkpoint) -> bool:
    """The file's name has the step, and some code takes names apart."""
    path = argument(found.call, "f", 1)
    words = [t.code.reads(n) for n in ast.walk(path)] if path is not None else []
    if not any(by_name(word) == POSITION for word in words if word):
        return any(isinstance(n, ast.Attribute) and n.attr == "last_epoch" for u in t.units for n in u.nodes)
    if any(full.startswith("re.") or t.code.reads(call.func) in ("split", "rsplit") for call, _, full in t.calls):
        return True
    into = [n for call, _ in t.loads for a in call.args for n in ast.walk(a)]
    return any(by_name(word) == POSITION for n in into if (word := t.code.reads(n)))


def _draws(t: Training) -> bool:
    for call, _, full in t.calls:
        if _DRAWS.match(full):
            return True
        if "loader" in t.kinds.of(call) and constant(argument(call, "shuffle", 2)) is True:
            return True
    return False


def _reseeds(t: Training) -> bool:
    """Random numbers of a step follow from its number."""
    for call, _, full in t.calls:
        if re.search(r"manual_seed$|set_seed$", full) and any(loop in t.all_loops for loop in t.graph.loops(call)):
            return True
        if t.code.reads(call.func) == "manual_seed" and any(loop in t.all_loops for loop in t.graph.loops(call)):
            return True
    return False


def _not_restored(t: Training, found: Checkpoint) -> Iterator[Finding]:
    """Saved, and never loaded, in a script that loads its model."""
    loaded = list(t.methods("load_state_dict"))
    into = [t.kinds.of(target) | {by_name(t.code.reads(target)) or "?"} for _, _, target in loaded]
    if not t.loads or not any("model" in kinds for kinds in into) or any(kinds == {"?"} for kinds in into):
        return
    used = {t.code.reads(call.func) for call, _, _ in t.calls}
    if used & {"set_optimizer_state_dict", "set_state_dict", "load_state", "load_checkpoint_in_model"} or not _resumes(
        t
    ):
        return
    call, unit = t.loads[0]
    for part, rule, what in (
        (OPTIMIZER, "checkpoint-optimizer", "the optimizer"),
        (SCHEDULE, "checkpoint-schedule", "the schedule"),
        (SCALER, "checkpoint-scaler", "the gradient scaler"),
    ):
        if part in found.held.parts and not any(part in kinds for kinds in into):
            yield Finding(rule, unit.module.shown, t.line(call), f"the state of {what} is saved, and never loaded.")
    if RNG in found.held.parts and not used & {"set_rng_state", "set_rng_state_all", "setstate", "set_state"}:
        yield Finding(
            "checkpoint-rng",
            unit.module.shown,
            t.line(call),
            "the state of the random numbers is saved, and never set.",
        )


def _resumes(t: Training) -> bool:
    """What is loaded has parts: `saved["model"]`."""
    names = {t.target(call) for call, _ in t.loads} - {""}
    for unit in t.units:
        for node in unit.nodes:
            if isinstance(node, ast.Subscript) and t.code.reads(node.value) in names:
                return True
    return False


def _order_lost(t: Training) -> Iterator[Finding]:
    """Saved in the middle of an epoch, and gone on from the epoch's start."""
    if not t.loads or not _resumes(t):
        return
    if any(kind in t.kinds.of(call) for call, _ in t.made("loader") for kind in ("stateful", "prepared")):
        return
    for loop in t.step_loops:
        if not isinstance(loop, ast.For | ast.AsyncFor) or "loader" not in t.kinds.of(loop.iter):
            continue
        inside = [c for c, u in t.saves if loop in t.graph.loops(c)]
        if not inside or _skips(t, loop):
            continue
        yield Finding(
            "order-lost",
            t.code.unit_of[inside[0]].module.shown,
            t.line(inside[0]),
            "it saves in the middle of an epoch, and a resumed run reads that epoch from its start.",
        )
        return


def _skips(t: Training, loop: ast.For | ast.AsyncFor) -> bool:
    """Batches that were read before: by islice, a sampler that is told, `if i < first: continue`."""
    words = {t.code.reads(n) for n in ast.walk(loop.iter)}
    if words & {"islice", "skip", "skip_first_batches", "skip_batches"}:
        return True
    used = {t.code.reads(call.func) for call, _, _ in t.calls}
    if used & {"skip_first_batches", "islice", "skip_batches", "set_position", "fast_forward", "attach"}:
        return True
    for node in t.graph.below(loop):
        if isinstance(node, ast.If) and any(isinstance(one, ast.Continue) for one in node.body):
            return True
    for _, _, target in t.methods("load_state_dict"):
        if t.kinds.of(target) & {"loader", "shares", "stateful"} or re.search(r"sampler|loader", t.code.reads(target)):
            return True
    if any(_SKIPPING.search(name) for name in t.code.attributes):
        return True
    inside = [n for part in (loop.iter, *loop.body) for n in ast.walk(part)]
    return any(_SKIPPING.search(n.id) for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))


def no_seed(t: Training) -> Iterator[Finding]:
    if not t.steps or t.project.left_out:
        return
    for call, _, full in t.calls:
        last = t.code.reads(call.func)
        if _SEEDS.match(full) or last in ("manual_seed", "seed_everything"):
            if not any(_CLOCK.match(t.code.dotted(n, t.code.unit_of[call])) for a in call.args for n in ast.walk(a)):
                return
        elif _SETS_UP.search(last.lower()) and not t.graph.callees.get(call) and _is_foreign(full):
            return  # of a package: who knows
        if any(k.arg == "seed" for k in call.keywords) and re.search(r"(Config|Arguments|Args|Trainer|Fabric)$", last):
            return
    unit, line = t.first_line()
    yield Finding(
        "no-seed", unit.module.shown, line, "torch's random numbers are never seeded: no run can be repeated."
    )


def _is_foreign(full: str) -> bool:
    """A function that is imported from somewhere that is not read here."""
    top, _, rest = full.partition(".")
    return bool(top and rest) and top not in ("random", "numpy", "torch", "self", "deepspeed", "datasets")


def non_atomic_save(t: Training) -> Iterator[Finding]:
    for call, unit in t.saves:
        path = argument(call, "f", 1)
        if path is None or "buffer" in t.kinds.of(path) or not any(one in t.all_loops for one in t.graph.loops(call)):
            continue
        if not _moved(t, unit):
            yield Finding(
                "non-atomic-save",
                unit.module.shown,
                t.line(call),
                "a process that is killed while it saves leaves half a checkpoint.",
            )


def _moved(t: Training, unit: Unit) -> bool:
    """In the function that saves, in one that it calls, or in one that calls it."""
    near = {unit, *(caller for caller, _ in t.graph.callers.get(unit, ()))}
    near |= {callee for node in unit.nodes for callee in t.graph.callees.get(node, ())}
    for one in near:
        for call in one.calls:
            full, last = t.code.called(call), t.code.reads(call.func)
            if full in _MOVES or (last == "rename" and call.args):
                return True
            if last == "replace" and len(call.args) == 1:  # of a path; of a text it has two
                return True
            if re.search(r"atomic", full.lower()):
                return True
    return False
