"""What a swarm has agreed on when it was made: the run file, whose it is, and the data that goes with it.

The swarm's id is the hash of these bytes, so an invitation fixes all of it: whoever joins trains this model on this
data in this order, or nothing. What a machine decides for itself (devices, layout, tracking, where checkpoints go) is
not in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.data.index import fingerprint_in
from shoal.errors import SetupError, ShoalError, SpecError, UsageError
from shoal.fleet.net.api import PeerId
from shoal.fleet.net.identity import canonical, is_peer
from shoal.fleet.outer.rule import Rule
from shoal.fleet.swarm.blob_store import is_name
from shoal.fleet.swarm.invite import plain
from shoal.spec import Run, dump, load
from shoal.spec.run import Checkpoint, Guard, Mesh, Plan, Resources, Track

FORMAT = "shoal charter 1"
MOST_CHARTER = 1 << 20
MOST_INPUTS = 64
OWN = ("resources", "mesh", "track", "checkpoint", "guard", "launch", "plan")  # each peer's own business
COMPUTING = ("train.precision", "train.fp8_head", "train.fp8_scaling", "train.compile", "train.kernels")
OWN_VALUES = (*COMPUTING, "data.cache_dir", "data.cache_gb")


@dataclass(frozen=True)
class Input:
    """A folder that the run reads: a data set with its tokenizer, or weights."""

    place: str  # its path in the charter's run file
    fingerprint: str  # of a data set, as its index.json states it; empty for weights
    folder: str  # the blob of its manifest; empty: peers bring it themselves
    manifest_bytes: int
    bytes: int
    near: str  # where it lies beside the run file, as a hint; empty: nowhere near


@dataclass(frozen=True)
class Charter:
    name: str
    organiser: PeerId
    created: int
    run: str  # the run file, with `place` for each input
    inputs: tuple[Input, ...]

    def to_bytes(self) -> bytes:
        held = {
            "format": FORMAT,
            "name": self.name,
            "organiser": self.organiser,
            "created": self.created,
            "run": self.run,
            "inputs": [vars(i) for i in self.inputs],
        }
        return canonical(held)

    @property
    def swarm(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def blobs(self) -> set[str]:
        """What `Blobs.retain` has to keep for newcomers."""
        return {i.folder for i in self.inputs if i.folder}

    @classmethod
    def of(cls, data: bytes, swarm: str) -> Charter:
        """Of what came over the network; SetupError unless it is that swarm's."""
        wrong = SetupError("what the peers call the swarm's charter is not what the invitation names; ask for another.")
        if len(data) > MOST_CHARTER or hashlib.sha256(data).hexdigest() != swarm:
            raise wrong
        try:
            held = json.loads(data)
            if held["format"] != FORMAT:
                raise SetupError(
                    f"the swarm was made by another version of Shoal ({held['format']}); install that one."
                )
            inputs = tuple(_input(i) for i in held["inputs"])
            if len(inputs) > MOST_INPUTS or not is_peer(held["organiser"]) or not isinstance(held["run"], str):
                raise wrong
            return cls(plain(held["name"], 100), held["organiser"], int(held["created"]), held["run"], inputs)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise wrong from None

    @classmethod
    def load(cls, file: Path) -> Charter:
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            raise UsageError(f"this run is in no swarm: there is no {file}.") from None
        return cls.of(data, hashlib.sha256(data).hexdigest())

    def local(self, file: Path, at: Mapping[str, Path], overrides: list[str]) -> Run:
        """The run as this peer trains it: the charter's, with the folders of this machine and its own choices."""
        for text in overrides:
            key = text.partition("=")[0].lstrip("-")
            if key.partition(".")[0] not in OWN and key not in OWN_VALUES:
                own = ", ".join((*OWN, *OWN_VALUES))
                raise UsageError(f"{key} is the same for all peers of a swarm; of your own are {own}.")
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            part.write_text(self.run, encoding="utf-8")
            run = load(part, overrides).run
        except SpecError as e:
            raise SetupError(f"the swarm's run file does not fit this version of Shoal: {e}") from None
        finally:
            part.unlink(missing_ok=True)
        return _with_paths(run, lambda path: str(at.get(os.path.relpath(path, file.parent), path)))


def write_charter(
    run: Run, organiser: PeerId, run_file: Path, add: Callable[[Path], tuple[str, int]] | None
) -> tuple[Charter, dict[str, Path]]:
    """The charter of a run, and where its inputs are here. `add` takes a folder into the blobs; None: peers bring
    their own data."""
    places: dict[str, str] = {}  # path here: place
    inputs: list[Input] = []

    def place(path: str) -> str:
        if "://" in path:
            return path
        if path not in places:
            folder = Path(path)
            places[path] = f"inputs/{len(places)}-{folder.name}"
            name, size = ("", 0) if add is None else add(folder)
            total = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
            inputs.append(Input(places[path], fingerprint(folder), name, size, total, _near(path, run_file)))
        return places[path]

    shared = _with_paths(run, place).model_copy(
        update={
            "mesh": Mesh(),
            "resources": Resources(),
            "track": Track(),
            "guard": Guard(),
            "plan": Plan(),
            "checkpoint": Checkpoint(),
            "launch": type(run.launch)(),
            "swarm": Rule.of(run.swarm).stated(run.swarm),
        }
    )
    text = dump(shared.model_copy(update={"data": shared.data.model_copy(update={"cache_dir": None})}))
    charter = Charter(run.name, organiser, int(time.time()), text, tuple(inputs))
    return charter, {place: Path(path) for path, place in places.items()}


def fingerprint(folder: Path) -> str:
    """Of a data set; empty where there is none."""
    return fingerprint_in(folder) or ""


def _with_paths(run: Run, to: Callable[[str], str]) -> Run:
    def sources(given: Any) -> tuple[Any, ...]:
        return tuple(s.model_copy(update={"path": to(s.path)}) for s in given)

    data = run.data.model_copy(update={"train": sources(run.data.train), "eval": sources(run.data.eval)})
    weights = run.model.weights
    model = run.model if weights is None else run.model.model_copy(update={"weights": to(weights)})
    return run.model_copy(update={"data": data, "model": model})


def _near(path: str, run_file: Path) -> str:
    """Relative to the run file, unless that tells more about the organiser's disk than anybody needs."""
    relative = os.path.relpath(path, run_file.resolve().parent)
    return relative if relative.count("..") <= 2 and not os.path.isabs(relative) else ""


def _input(found: Any) -> Input:
    place, folder = plain(found["place"], 1024), found["folder"]
    if not place.startswith("inputs/") or ".." in place.split("/") or not (folder == "" or is_name(folder)):
        raise ValueError("an input that is none")
    manifest, total = found["manifest_bytes"], found["bytes"]
    if type(manifest) is not int or type(total) is not int or min(manifest, total) < 0:
        raise ValueError("an input that is none")
    return Input(place, plain(found["fingerprint"], 200), folder, manifest, total, plain(found["near"], 1024))


def find_input(wanted: Input, folders: list[Path]) -> Path | None:
    """The same data set on this machine: in one of the folders, or one below."""
    if not wanted.fingerprint:
        return None
    for folder in folders:
        try:
            there = [folder, folder / wanted.near, *(p for p in folder.iterdir() if p.is_dir())]
        except (OSError, ShoalError):
            continue
        for one in there:
            if fingerprint(one) == wanted.fingerprint:
                return one.resolve()
    return None
