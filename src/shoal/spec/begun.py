"""What may change in a run that has begun, and where two specs of it differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.spec.run import Run

# What may change in a run that has begun. Everything else is its history: the data and their order, the model, what one
# step is. (Changing the learning rate or the layout changes what comes, not what was.)
SAFE = (
    "train.steps",
    "train.epochs",
    "train.tokens",
    "train.clip",
    "train.z_loss",
    "train.precision",
    "train.fp8_head",
    "train.fp8_scaling",
    "train.compile",
    "train.kernels",
    "train.optimizer.lr",
    "train.optimizer.muon_lr",
    "train.optimizer.weight_decay",
    "train.optimizer.muon_weight_decay",
    "train.optimizer.decay_embeddings",
    "train.optimizer.betas",
    "train.optimizer.eps",
    "train.optimizer.muon_momentum",
    "train.schedule.",
    "data.eval",
    "data.cache_dir",
    "data.cache_gb",
    "eval.",
    "checkpoint.",
    "track.",
    "guard.",
    "own.changed",
    "own.folder",
    "own.hooks",
    "own.launcher",
    "own.settings",
    "own.settings.",
    "plan.",
    "launch.",
    "mesh.",
    "engine.",
    "resources.",
    "script.",  # what breaks its history, only its author knows
    # What units there are is the history of a batch; how the ones to come are run is not.
    "batch.command",
    "batch.at_once",
    "batch.retries",
    "batch.timeout",
    "batch.env.",
    "batch.env",
    "batch.folder",
    "batch.outputs",
    # Where a model cut over peers is cut, and how things travel. (`rank` is another model.)
    "swarm.stages.count",
    "swarm.stages.activations",
    "swarm.stages.gradients",
    "swarm.stages.in_flight",
    "swarm.stages.save_every",
)


@dataclass(frozen=True)
class Difference:
    key: str
    old: Any
    new: Any

    @property
    def safe(self) -> bool:
        return self.moved or any(self.key == name or (name[-1] == "." and self.key.startswith(name)) for name in SAFE)

    @property
    def moved(self) -> bool:
        """The same data sets, as far as a spec can tell, in another place: what is in them is compared when they are
        opened, and where they lie is no history."""
        if self.key != "data.train" or not self.old or not self.new or len(self.old) != len(self.new):
            return False
        return all({**a, "path": ""} == {**b, "path": ""} for a, b in zip(self.old, self.new, strict=True))

    @property
    def argument(self) -> str:
        """As it is given on a command line."""
        if not self.moved:
            return f"{self.key}={'' if self.new is None else self.new}"
        if len(self.new) == 1:
            return f"{self.key}={self.new[0]['path']}"
        return (
            "'"
            + f"{self.key}=["
            + ", ".join(f"{{path: {s['path']}, weight: {s['weight']:g}}}" for s in self.new)
            + "]'"
        )

    def __str__(self) -> str:
        return f"{self.key} was {_shown(self.old)}, now {_shown(self.new)}"


def differences(old: Run, new: Run, auto_is_equal: bool) -> list[Difference]:
    """Where two specs differ. With `auto_is_equal` a new `auto` agrees with whatever was decided before, and so do the
    epochs or tokens that `train.steps: auto` follows from; and no past schedules agree with those that there were."""
    before, after = flat(old.model_dump(mode="json")), flat(new.model_dump(mode="json"))
    if auto_is_equal and not after["train.schedule.past"]:
        before.pop("train.schedule.past"), after.pop("train.schedule.past")
    if auto_is_equal and after["train.steps"] == "auto":
        for key in ("train.epochs", "train.tokens"):
            before.pop(key), after.pop(key)
    return [
        Difference(key, before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and not (auto_is_equal and after.get(key) == "auto")
    ]


def as_begun(old: Run, new: Run) -> Run:
    """A run by its file, which goes on: a rate or a warm-up that the file leaves to `auto` is the one that it was begun
    with. Before its length is closed."""
    optimizer, schedule = new.train.optimizer, new.train.schedule
    if optimizer.muon_lr == "auto":
        optimizer = optimizer.model_copy(update={"muon_lr": old.train.optimizer.muon_lr})
    if schedule.warmup_steps == "auto":
        schedule = schedule.model_copy(update={"warmup_steps": old.train.schedule.warmup_steps})
    return new.model_copy(update={"train": new.train.model_copy(update={"optimizer": optimizer, "schedule": schedule})})


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """By dotted names. Sections are opened up; lists (the sources of a mixture) are one value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        found.update(flat(value, f"{name}.") if isinstance(value, dict) else {name: value})
    return found


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, dict) and "path" in item for item in value):
        return "[" + ", ".join(str(item["path"]) for item in value) + "]"
    return "empty" if value is None else str(value)
