"""What a swarm has agreed on when it was made: whose it is, the values of the run that are the same for all, its data.

The swarm's id is the hash of these bytes, so an invitation fixes all of it: whoever joins trains this model on this
data in this order, or nothing. It comes from somebody else, so it is read as a proposal (`proposal`): a closed set of
values with ranges, and inputs that have no path but a place below the folder of this run. What a machine decides for
itself is not in it, and is refused if it is.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from shoal import values
from shoal.data.index import fingerprint_in, index_in
from shoal.decide.load import load
from shoal.errors import SetupError, SpecError, UsageError
from shoal.net.api import PeerId
from shoal.net.identity import canonical
from shoal.plain_file import read_plain
from shoal.spec import Run, dump
from shoal.spec.balancing import with_balancing
from shoal.spec.drivers import refusals, swarm_driver_of
from shoal.spec.length import decay_steps, warmup_steps
from shoal.spec.run import NAME_PATTERN
from shoal.spec.start_values import with_rule
from shoal.swarm import proposal
from shoal.swarm.blob_folder import MOST_MANIFEST
from shoal.swarm.invite import plain
from shoal.swarm.outer.rule import Rule
from shoal.swarm.proposal import MOST_BYTES, Unfit
from shoal.values import BadValue, items, read_object, table, text, whole

FORMAT = "shoal charter 4"
MOST_CHARTER = 1 << 20
MOST_INPUTS = 64
MOST_FIELDS = 256  # of an object in it
MOST_NAME = 256
MOST_LOOKED_AT = 10_000  # folders, for a data set that is here already
INPUTS = "inputs"  # the folder of the run directory that they are in
_FIELDS = {"format", "name", "organiser", "created", "run", "inputs"}
_PLACE = re.compile(rf"{INPUTS}/[0-9]{{1,3}}-[A-Za-z0-9_-][A-Za-z0-9._-]{{0,99}}")
_ADDRESS = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,62}(/[A-Za-z0-9!_.*'()=+,-]+)*/?")
Where = Path | str  # a folder here, or the address of a store


@dataclass(frozen=True)
class Input:
    """What the run reads: a data set with its tokenizer, or weights."""

    place: str  # below the run's folder; by it the run file names the input
    fingerprint: str  # of a data set, as its index.json states it; empty for weights
    folder: str  # the blob of its manifest; empty: peers bring it themselves, or it is in a store
    manifest_bytes: int
    bytes: int
    address: str = ""  # of a store that it is read from; whoever joins has to allow that


@dataclass(frozen=True)
class Charter:
    name: str
    organiser: PeerId
    created: int
    run: dict[str, Any]  # sections of the run file, with `place` for each input
    inputs: tuple[Input, ...]

    def to_bytes(self) -> bytes:
        held = {
            "format": FORMAT,
            "name": self.name,
            "organiser": self.organiser,
            "created": self.created,
            "run": self.run,
            "inputs": [asdict(i) for i in self.inputs],
        }
        return canonical(held)

    @property
    def swarm(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def blobs(self) -> set[str]:
        """What `Blobs.retain` has to keep for newcomers."""
        return {i.folder for i in self.inputs if i.folder}

    @property
    def stages(self) -> int:
        """That the model is cut into; 1: every peer holds it."""
        return int(self.run["swarm"].get("stages", {}).get("count", 1))

    @property
    def places(self) -> list[str]:
        return [i.place for i in self.inputs]

    @classmethod
    def of(cls, data: bytes, swarm: str) -> Charter:
        """Of what came over the network; SetupError unless it is that swarm's and proposes nothing but what one peer
        may propose to another."""
        if len(data) > MOST_CHARTER or hashlib.sha256(data).hexdigest() != swarm:
            raise SetupError(
                "what the peers call the swarm's charter is not what the invitation names; ask for another."
            )
        try:
            held = read_object(data)
            if held.get("format") != FORMAT:
                version = plain(held.get("format"), 40)
                raise SetupError(f"the swarm was made by another version of Shoal ({version}); install that one.")
            if more := held.keys() - _FIELDS:
                raise Unfit(f"it has a field {min(more)[:100]!r}, which no charter has")
            inputs = tuple(_input(table(i, MOST_FIELDS)) for i in items(held.get("inputs"), MOST_INPUTS))
            name = text(held.get("name"), MOST_NAME)
            if not re.match(NAME_PATTERN, name):
                raise Unfit("its name is none")
            if len({i.place for i in inputs}) < len(inputs) or sum(i.bytes for i in inputs) > MOST_BYTES:
                raise Unfit("its inputs are in one place, or too large")
            run = table(held.get("run"), MOST_FIELDS)
            charter = cls(name, values.name(held.get("organiser")), whole(held.get("created")), run, inputs)
            proposal.run_of(name, charter.run, {place: place for place in charter.places})
            return charter
        except (Unfit, ValueError) as e:  # BadValue, Forged
            raise SetupError(
                f"the swarm's charter is refused: {e}; do not join, and tell whoever invited you."
            ) from None

    @classmethod
    def load(cls, file: Path) -> Charter:
        try:
            data = read_plain(file, MOST_CHARTER)
        except FileNotFoundError:
            raise UsageError(f"this run is in no swarm: there is no {file}.") from None
        except OSError as e:  # NotPlain
            raise SetupError(f"the swarm's charter cannot be read ({e}); join again with an invitation.") from None
        return cls.of(data, hashlib.sha256(data).hexdigest())

    def founded(self, run: Run) -> Run:
        """Of a cut model: the founder's run, with what is alike in the words in which the others have it."""
        agreed = proposal.run_of(self.name, self.run, {place: place for place in self.places})
        return run.model_copy(update={"model": agreed.model, "train": agreed.train, "swarm": agreed.swarm})

    def local(self, file: Path, at: Mapping[str, Where], overrides: list[str]) -> Run:
        """The run as this peer trains it: what the charter proposes, this machine's folders, and its own choices."""
        here = {i.place: str(at.get(i.place) or i.address or file.parent / i.place) for i in self.inputs}
        proposed = proposal.run_of(self.name, self.run, here)
        mine = _overridden(proposed, overrides)
        if problems := refusals(mine, swarm_driver_of(proposed)):
            raise UsageError("\n".join(f"{sentence}." for _, sentence in problems))
        if name := proposal.not_own(mine, proposed):
            own = ", ".join(proposal.own_names(proposed))
            raise UsageError(f"{name} is the same for all peers of a swarm, or has no effect; of your own are {own}.")
        return mine


def write_charter(
    run: Run, organiser: PeerId, add: Callable[[Path], tuple[str, int]] | None
) -> tuple[Charter, dict[str, Where]]:
    """The charter of a run, and where its inputs are here. `add` takes a folder into the blobs; None: peers bring
    their own data."""
    places: dict[str, str] = {}  # path here: place
    inputs: list[Input] = []

    def place(path: str) -> str:
        if path not in places:
            called = re.sub(r"[^A-Za-z0-9._-]", "-", path.rstrip("/").rpartition("/")[2]).lstrip(".")[:60]
            places[path] = f"{INPUTS}/{len(places)}-{called or 'data'}"
            inputs.append(_store(path, places[path]) if "://" in path else _folder(Path(path), places[path], add))
        return places[path]

    values = proposal.values_of(_with_paths(_stated(run), place))
    try:
        proposal.run_of(run.name, values, {i.place: i.place for i in inputs})
        if len(inputs) > MOST_INPUTS or sum(i.bytes for i in inputs) > MOST_BYTES:
            raise Unfit(f"it has more than {MOST_INPUTS} inputs, or inputs of more than {MOST_BYTES:.0e} bytes")
    except Unfit as e:
        raise SpecError(f"no peer would take a swarm of this run: {e}.") from None
    charter = Charter(run.name, organiser, int(time.time()), values, tuple(inputs))
    return charter, {place: path if "://" in path else Path(path) for path, place in places.items()}


def _stated(run: Run) -> Run:
    """With numbers for what `auto` and shares mean here: a peer of another version might choose otherwise."""
    schedule = run.train.schedule
    steps = {
        "warmup_steps": warmup_steps(schedule.warmup_steps, run.steps),
        "decay_steps": decay_steps(schedule.decay_steps, run.steps),
    }
    train = run.train.model_copy(update={"schedule": schedule.model_copy(update=steps)})
    outer = Rule.of(run.swarm).stated(run.swarm)
    model = with_balancing(with_rule(run.model, run.train.optimizer.name))
    return run.model_copy(update={"model": model, "train": train, "swarm": outer})


def fingerprint(folder: Path) -> str:
    """Of a data set; empty where there is none."""
    return fingerprint_in(folder) or ""


def vocabulary(folder: Path) -> int | None:
    """Of a data set, as its index states it."""
    index = index_in(folder)
    return None if index is None else index.vocab_size


def find_input(wanted: Input, folders: list[Path]) -> Path | None:
    """The same data set on this machine: in one of the folders that its owner has named, or at most two below."""
    if not wanted.fingerprint:
        return None
    for folder in folders:
        for pattern in (".", "*", "*/*"):
            for one in [folder] if pattern == "." else islice(folder.glob(pattern), MOST_LOOKED_AT):
                if fingerprint(one) == wanted.fingerprint:
                    return one.resolve()
    return None


def covers(allowed: str, address: str) -> bool:
    """Whether somebody who allows the one address allows the other, which is the same or below it."""
    above = allowed.rstrip("/")
    return address.rstrip("/") == above or address.startswith(f"{above}/")


def _overridden(run: Run, overrides: list[str]) -> Run:
    """By way of a file, so that a wrong override is told as everywhere."""
    if not overrides:
        return run
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(dump(run), encoding="utf-8")
        return load(file, overrides).run


def _folder(folder: Path, place: str, add: Callable[[Path], tuple[str, int]] | None) -> Input:
    name, size = ("", 0) if add is None else add(folder)
    total = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    return Input(place, fingerprint(folder), name, size, total)


def _store(address: str, place: str) -> Input:
    if not _ADDRESS.fullmatch(address) or ".." in address.split("/"):
        raise SpecError(f"{address}: a swarm's data is in folders, or in s3://bucket/prefix with plain letters.")
    return Input(place, "", "", 0, 0, address)


def _with_paths(run: Run, to: Callable[[str], str]) -> Run:
    def sources(given: Any) -> tuple[Any, ...]:
        return tuple(s.model_copy(update={"path": to(s.path)}) for s in given)

    data = run.data.model_copy(update={"train": sources(run.data.train), "eval": sources(run.data.eval)})
    weights = run.model.weights
    model = run.model if weights is None else run.model.model_copy(update={"weights": to(weights)})
    return run.model_copy(update={"data": data, "model": model})


def _input(found: dict[str, Any]) -> Input:
    if more := found.keys() - Input.__dataclass_fields__.keys():
        raise Unfit(f"an input has a field {min(more)[:100]!r}, which none has")
    place, folder, address = found.get("place"), found.get("folder"), found.get("address")
    if not isinstance(place, str) or not _PLACE.fullmatch(place):
        raise Unfit(f"an input is at {str(place)[:80]!r}, which is no place below the run's folder {INPUTS}")
    if not isinstance(address, str) or (address and not _ADDRESS.fullmatch(address)) or ".." in address.split("/"):
        raise Unfit(f"an input is at {str(address)[:80]!r}, which is no address of a store")
    folder = "" if folder == "" else values.name(folder)
    if folder and address:
        raise BadValue("an input that is in two places")
    manifest, total = whole(found.get("manifest_bytes"), MOST_MANIFEST), whole(found.get("bytes"))
    if total > MOST_BYTES:
        raise Unfit(f"{place} has {total} bytes, and no peer takes more than {MOST_BYTES:.0e}")
    return Input(place, plain(found.get("fingerprint"), 200), folder, manifest, total, address)
