"""Every name of the run file, in every driver: it is read there, or refused when somebody sets it."""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from shoal.decide.checks import trainable
from shoal.errors import SpecError
from shoal.spec import Run
from shoal.spec.drivers import CALLED, FOREIGN, OTHERS, REFUSED, Driver, obeyed, other_verb, refusals, rule
from shoal.spec.names import Name, lookup, names
from tests.spec.settings import LEAVES, changes, least

SRC = Path(importlib.util.find_spec("shoal").origin or "").parents[1]  # type: ignore[union-attr]
DRIVERS: tuple[Driver, ...] = get_args(Driver)
# Where a driver begins, and what it imports for a word of it but never goes through.
BEGINS: dict[Driver, tuple[str, ...]] = {
    "loop": ("shoal.train.worker", "shoal.decide.auto", "shoal.guard.supervise", "shoal.track.mirror"),
    "islands": (
        "shoal.islands.worker",
        "shoal.decide.auto",
        "shoal.guard.island",
        "shoal.guard.supervise",
        "shoal.track.mirror",
    ),
    "swarm": ("shoal.swarm.trainer.worker", "shoal.decide.length", "shoal.swarm.start", "shoal.track.mirror"),
    "cut": ("shoal.stages.node",),
    "stages": ("shoal.stages.__main__",),
    "script": ("shoal.guard.script_work", "shoal.decide.script", "shoal.guard.supervise", "shoal.track.mirror"),
    "batch": ("shoal.batch.session", "shoal.decide.batch"),
}
PLAIN = ("shoal.train.loop", "shoal.train.saves", "shoal.train.numerics", "shoal.train.takeover", "shoal.train.replay")
CUT = (
    *(module for module in PLAIN if module != "shoal.train.saves"),
    "shoal.train.worker",
    "shoal.parallel.build",
    "shoal.guard",
    "shoal.swarm",
)
NOT_IN: dict[Driver, tuple[str, ...]] = {
    "loop": ("shoal.islands.worker", "shoal.islands", "shoal.guard.island"),
    "islands": ("shoal.swarm.trainer.worker", "shoal.swarm", "shoal.stages"),
    "swarm": (*PLAIN, "shoal.islands.worker", "shoal.guard.supervise", "shoal.guard.crew", "shoal.stages"),
    "cut": CUT,
    "stages": CUT,
    "script": (*PLAIN, "shoal.train", "shoal.islands", "shoal.swarm", "shoal.stages", "shoal.guard.island"),
    "batch": (*PLAIN, "shoal.train", "shoal.islands", "shoal.swarm", "shoal.stages", "shoal.guard.supervise"),
}
BY_PROPERTY = {"checkpoint.remote": ("run", "remote_checkpoints"), "train.steps": ("run", "steps")}  # of `Run`
# The rules of the file and the table itself look at names without obeying them.
NOBODY = (
    "shoal.spec.run",
    "shoal.spec.rules",
    "shoal.spec.drivers",
    "shoal.decide.checks",
    "shoal.spec.names",
    "shoal.plan.",
    "shoal.cli.",
)


OPTIONAL = (
    "model.experts",
    "model.mamba",
    "model.mla",
    "model.rope_scaling",
    "script",
    "batch",
)  # sections that are named as a whole


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_table_is_about_names_there_are(driver: Driver) -> None:
    known = {n.dotted for n in names()}
    assert REFUSED[driver].keys() <= known
    assert OTHERS[driver].keys() <= known
    for name in LEAVES:
        kinds = (name.dotted in obeyed(driver), rule(name.dotted, driver) is not None, other_verb(name.dotted, driver))
        assert sum(map(bool, kinds)) == 1 or (name.dotted.startswith("swarm.") and driver in ("loop", "islands"))


@pytest.mark.parametrize("name", LEAVES, ids=lambda n: n.dotted)
def test_a_name_without_effect_is_refused_when_it_is_set(name: Name) -> None:
    """In all drivers: what the run files are is found once for them; those of scripts and batches are others."""
    of_training: list[Driver] = [d for d in DRIVERS if d not in FOREIGN]
    for foreign, drivers in ((None, of_training), ("script", ["script"]), ("batch", ["batch"])):
        if foreign and name.dotted == "data.train.*.weight":
            continue  # of a source that is refused itself
        usual = Run.model_validate(least(name, foreign))
        changed = [Run.model_validate(values) for _, values in changes(name, foreign)]
        assert changed
        for driver in drivers:
            no = rule(name.dotted, driver)
            if no is None:
                same = refusals(usual, driver)
                assert all(refusals(run, driver) == same for run in changed), driver
            else:
                _refused(name, driver, no.fits, usual, changed)


def _refused(name: Name, driver: Driver, fits: Sequence[object], usual: Run, changed: list[Run]) -> None:
    told, wanted = 0, name.dotted.replace("*", "0")
    if not wanted.startswith(OPTIONAL):
        assert wanted not in dict(refusals(usual, driver)) or name.field.is_required()
    for run in changed:
        value = _value(run, name.dotted.replace("*", "0"))
        found = dict(refusals(run, driver))
        wanted = next((part for part in OPTIONAL if wanted.startswith(f"{part}.")), wanted)
        fit = any(value == fit and type(value) is type(fit) for fit in fits)
        assert (wanted in found) != fit, (driver, value, found)
        told += wanted in found
    assert told, f"{name.dotted} cannot be refused by {driver}: all that it can be is in fits"


def _value(run: Run, name: str) -> Any:
    found: Any = run.model_dump(mode="json")
    for part in name.split("."):
        found = found[int(part) if part.isdecimal() else part]
    return found


def test_who_starts_a_driver_refuses_in_one_sentence_a_name() -> None:
    run = Run.model_validate({**least(), "guard": {"hang": "off"}, "checkpoint": {"remote": "s3://bucket"}})
    trainable(run)
    with pytest.raises(SpecError) as e:
        trainable(run, "swarm")
    said = str(e.value).split("\n")
    assert [line.split(" has no effect in a peer of a swarm: ")[0] for line in said] == [
        "checkpoint.remote",
        "guard.hang",
    ]
    with pytest.raises(SpecError, match=CALLED["stages"]):
        trainable(run, "stages")


@pytest.mark.parametrize("driver", DRIVERS)
def test_what_a_driver_obeys_is_read_in_its_modules(driver: Driver) -> None:
    """A proof by reading: somewhere in what the driver imports, the value is taken out of its section."""
    read = set[tuple[str, str]]()
    modules = _closure(driver)
    for module in modules:
        read |= _reads(module)
    unread = [n for n in obeyed(driver) if n not in ("name", "model.preset") and not _is_read(n, read)]
    assert unread == [], f"{len(modules)} modules of {driver}"


def _is_read(name: str, read: set[tuple[str, str]]) -> bool:
    """Read as section.value, or as a whole section that is handed on (`Shape`, an optimizer's settings)."""
    *above, last = [part for part in name.split(".") if part != "*"]
    section = above[-1] if above else "run"
    return (section, last) in read or (section, "*") in read or BY_PROPERTY.get(name) in read


@cache
def _closure(driver: Driver) -> tuple[str, ...]:
    found, left = set[str](), list(BEGINS[driver])
    while left:
        module = left.pop()
        if module in found or module.startswith((*NOT_IN[driver], *NOBODY)):
            continue
        found.add(module)
        left += _imports(module)
    return tuple(sorted(found))


def _file(module: str) -> Path | None:
    path = SRC / Path(*module.split("."))
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)


@cache
def _tree(module: str) -> ast.Module:
    file = _file(module)
    return ast.parse(file.read_text() if file else "")


@cache
def _imports(module: str) -> tuple[str, ...]:
    found = set[str]()
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shoal"):
            found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.startswith("shoal")}
    return tuple(m for m in found if _file(m) and m != "shoal")  # which names the API's modules, and loads none


SECTIONS = {str(n.path[-1] if n.path[-1] != "*" else n.path[-2]): n.section for n in names() if n.section}
KINDS = {section.__name__: (name,) for name, section in SECTIONS.items() if section}
KINDS |= {"Run": ("run",), "Source": ("train", "eval")}


LOOKED_AT = (ast.arg, ast.AnnAssign, ast.Assign, ast.For, ast.comprehension, ast.Attribute, ast.Call)


@cache
def _reads(module: str) -> frozenset[tuple[str, str]]:
    """(section, value) of every attribute that is taken from a section of the run file, as far as one can see: by a
    chain (`run.train.clip`), by a name that was given a section, or by a parameter of that type."""
    found, tree = set[tuple[str, str]](), _tree(module)
    called: dict[str, set[str]] = defaultdict(set)  # variable: sections that it may be
    kinds = {**KINDS, **_aliases(tree)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, LOOKED_AT)]
    for node in [*nodes, *nodes]:  # twice: what was given a variable that was given a section
        for variable, section in _named(node, kinds, called):
            called[variable].add(section)
    for node in nodes:
        if isinstance(node, ast.Attribute):
            for section in _sections(node.value, called):
                found.add((section, node.attr))
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name == "getattr" and node.args:
                found |= {(section, "*") for section in _sections(node.args[0], called)}
            elif name in ("model_dump", "asdict") and isinstance(node.func, ast.Attribute):
                found |= {(section, "*") for section in _sections(node.func.value, called)}
    return frozenset(found)


def _sections(node: ast.expr, called: dict[str, set[str]]) -> set[str]:
    if isinstance(node, ast.Attribute):
        own = {node.attr.lstrip("_")} & (SECTIONS.keys() | {"run"})
        return own | called.get(node.attr, set())
    return called.get(node.id, set()) if isinstance(node, ast.Name) else set()


def _aliases(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """`from shoal.spec.run import Optimizer as Spec`."""
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and str(n.module).startswith("shoal.spec")]
    return {a.asname: KINDS[a.name] for n in imports for a in n.names if a.asname and a.name in KINDS}


def _handed_on(node: ast.expr) -> list[str]:
    """`spec`, and `policy or Guard()`."""
    if isinstance(node, ast.BoolOp):
        return [name for value in node.values for name in _handed_on(value)]
    return [node.id] if isinstance(node, ast.Name) else []


def _named(node: ast.AST, kinds: dict[str, tuple[str, ...]], called: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        variable = (
            node.arg if isinstance(node, ast.arg) else getattr(node.target, "id", getattr(node.target, "attr", ""))
        )
        for part in ast.walk(node.annotation):
            if isinstance(part, ast.Name | ast.Attribute):
                for section in kinds.get(part.id if isinstance(part, ast.Name) else part.attr, ()):
                    yield variable, section
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for left, right in pairs:
                name = left.id if isinstance(left, ast.Name) else getattr(left, "attr", "")
                for part in ast.walk(right):
                    if isinstance(part, ast.Attribute) and part.attr.lstrip("_") in SECTIONS:
                        yield name, part.attr.lstrip("_")
                for part in _handed_on(right):
                    yield from ((name, section) for section in called.get(part, set()) if name)
    elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
        for part in ast.walk(node.iter):
            if isinstance(part, ast.Attribute) and part.attr in ("train", "eval"):
                yield node.target.id, part.attr
            elif isinstance(part, ast.Name):
                yield from ((node.target.id, section) for section in called.get(part.id, set()))


def test_the_proof_tells_what_is_read_from_what_is_not() -> None:
    assert ("data", "skip") in _reads("shoal.train.parts")
    assert ("checkpoint", "keep_every") in _reads("shoal.swarm.trainer.mesh")
    everything = {pair for module in _closure("swarm") for pair in _reads(module)}
    for name in ("guard.hang", "guard.spikes", "checkpoint.remote", "checkpoint.read_back", "checkpoint.background"):
        assert not _is_read(name, everything), name
        assert lookup(tuple(name.split(".")))
