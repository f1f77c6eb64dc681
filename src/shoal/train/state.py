"""What a checkpoint holds, in and out: parameters, optimizer state, the step, and what the run must not change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from shoal import checkpoint
from shoal.checkpoint.find import Roots
from shoal.checkpoint.names import Name
from shoal.data.index import Index
from shoal.data.own_windows import Identity
from shoal.data.skips import Skips
from shoal.errors import CheckpointError, DataError
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.spec.before import as_then
from shoal.spec.begun import differences
from shoal.spec.run import Run
from shoal.train.changes import changes
from shoal.train.optim import Optimizers
from shoal.train.own import NOTHING, Own
from shoal.train.training import Tell

_MOVES = ("name", "data.train", "model.weights")  # where things are may change; what they are is compared otherwise


@dataclass(frozen=True)
class State:
    run: Run
    model: Laid
    optimizers: Optimizers
    data: Sequence[Index | Identity]
    environment: dict[str, Any]
    eval_loss: dict[int, float] = field(default_factory=dict)  # of the newest evaluation, by its step
    skips: Skips = field(default_factory=Skips)  # batches of the order that are left out
    own: Own = NOTHING
    besides: dict[str, Any] = field(default_factory=dict)  # what else each checkpoint says

    @property
    def batch(self) -> int:
        return self.run.train.batch

    @property
    def _fingerprints(self) -> list[str]:
        return [index.fingerprint for index in self.data]

    @property
    def _sums(self) -> list[str]:
        return [index.sums for index in self.data]

    def tensors(self) -> dict[str, torch.Tensor]:
        model = {f"model.{name}": t for name, t in self.model.saved().items()}
        for name, t in model.items():  # the master weights, never a copy gathered or cast for computing
            assert t.dtype == torch.float32, f"{name} is {t.dtype} where float32 master weights are saved"
        return {**model, **self.optimizers.tensors()}

    def holders(self) -> dict[str, list[int]] | None:
        """Of each tensor, the ranks that write it; None where every process holds every tensor."""
        if not self.model.apart:
            return None
        owners = self.model.holders()
        optimizer = {key: owners[name] for key, name in self.optimizers.owners().items()}
        return {**{f"model.{name}": ranks for name, ranks in owners.items()}, **optimizer}

    def extra(self, step: int) -> dict[str, Any]:
        """What a checkpoint says beside its tensors. There is no state of a random generator to be saved: what is
        random in a step is seeded with the step's number (`shoal.train.loop`)."""
        return {
            "step": step,
            "position": self.skips.batch_of(step) * self.batch,
            "batch": self.batch,
            "skips": self.skips.spans,
            "data": self._fingerprints,
            "data_sums": self._sums,
            "rng": {"seed": self.run.seed, "rule": "each step is seeded with (seed, step, data-parallel rank)"},
            "eval_loss": _finite(self.eval_loss.get(step)),
            "spec": self.run.model_dump(mode="json"),
            "environment": self.environment,
            **({"hooks": states} if (states := self.own.states()) else {}),
            **({"without_state": names} if (names := self.optimizers.without()) else {}),
            **self.besides,
        }

    def measured(self, step: int, loss: float) -> None:
        """An evaluation, for the checkpoint of that step: the best are kept by it."""
        self.eval_loss.clear()
        self.eval_loss[step] = loss

    def restore(self, roots: Roots, tell: Tell, at_most: int | None = None) -> checkpoint.Found | None:
        """Fills the state in place from the newest good checkpoint (up to step `at_most`) and says which it was; None
        when there is none."""
        before = None if at_most is None else Name(at_most + 1, 0)
        tensors = self.tensors()
        found = checkpoint.restore(roots, tensors, before=before)
        if found is None:
            return None
        self.model.taken({name[len("model.") :]: t for name, t in tensors.items() if name.startswith("model.")})
        self.optimizers.taken_in(tensors)
        for skipped in found.skipped:
            if not skipped.known:
                tell("warning", text=f"checkpoint passed over and quarantined: {skipped}")
        saved_with = self.refuse_another_run(found)
        for text in [] if saved_with is None else changes(saved_with, self.run, found.step):
            tell("warning", text=text)
        self.skips.resume(found.extra.get("skips", []), found.step)
        self.optimizers.set_step(found.step)
        self.optimizers.forget_state(found.extra.get("without_state"))
        self.own.load(found.extra.get("hooks"))
        self.model.spread()
        return found

    def refuse_another_run(self, found: checkpoint.Found) -> Run | None:
        """The spec that the checkpoint was written with, where it can be read."""
        if "data" not in found.extra:
            raise CheckpointError(
                f"checkpoint {found.where} does not say what data it was trained on, so no run goes on from it; "
                "start a new one from its weights (model.weights)."
            )
        before, sums = found.extra["data"], found.extra.get("data_sums", self._sums)  # an older checkpoint has none
        if before != self._fingerprints or sums != self._sums:
            what = "its fingerprint" if before != self._fingerprints else "the checksums of its pieces"
            raise DataError(
                f"the training data is not what run '{self.run.name}' was trained on up to step {found.step} "
                f"({what} changed): restore the data, or start a new run from exported weights."
            )
        try:
            spec = Run.model_validate(as_then(found.extra["spec"]))
        except (KeyError, ValueError, TypeError, AttributeError):
            return None  # of another version of Shoal; names, shapes and data have been compared
        differ = [d for d in differences(spec, self.run, auto_is_equal=True) if not d.safe and d.key not in _MOVES]
        if differ:
            named = "; ".join(map(str, differ))
            raise CheckpointError(
                f"checkpoint {found.where} is of a run with another spec ({named}): give this run another name."
            )
        return spec


def _finite(value: float | None) -> float | None:
    """JSON has no NaN, and a checkpoint with one would have no manifest."""
    return value if value is not None and math.isfinite(value) else None


def digest(model: Laid, place: Place) -> str:
    """A fingerprint of all parameters, shard by shard: equal on equal layouts exactly when every bit is equal."""
    h = xxhash.xxh3_128()
    for name, piece in model.pieces():
        h.update(name.encode())
        h.update(piece.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    mine = torch.tensor(list(h.digest()), dtype=torch.uint8)
    if place.world == 1:
        return h.hexdigest()
    all_of_them = [torch.empty_like(mine) for _ in range(place.world)]
    dist.all_gather(all_of_them, mine)
    return xxhash.xxh3_128(bytes(torch.cat(all_of_them).tolist())).hexdigest()
