"""What a checkpoint holds, in and out: parameters, optimizer state, the step, and what the run must not change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.tensor import DTensor

from shoal import checkpoint
from shoal.errors import DataError
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.track.rundir import RunDir
from shoal.train.loop import Tell
from shoal.train.optim import Optimizers


@dataclass(frozen=True)
class State:
    model: Laid
    optimizers: Optimizers
    data_fingerprints: list[str]
    batch: int

    def tensors(self) -> dict[str, torch.Tensor]:
        model = {f"model.{name}": t for name, t in self.model.saved().items()}
        for name, t in model.items():  # the master weights, never a copy gathered or cast for computing
            assert t.dtype == torch.float32, f"{name} is {t.dtype} where float32 master weights are saved"
        return {**model, **self.optimizers.tensors()}

    def holders(self) -> dict[str, list[int]] | None:
        """Of each tensor, the ranks that write it; None where every process holds every tensor."""
        if self.model.pipeline is None:
            return None
        owners = self.model.holders()
        optimizer = {key: owners[name] for key, name in self.optimizers.owners().items()}
        return {**{f"model.{name}": ranks for name, ranks in owners.items()}, **optimizer}

    def extra(self, step: int) -> dict[str, Any]:
        return {"step": step, "position": step * self.batch, "data": self.data_fingerprints, "batch": self.batch}

    def restore(self, run_dir: RunDir, tell: Tell) -> int | None:
        """Fills the state in place from the newest good checkpoint; the committed steps it stands at, None when new."""
        found = checkpoint.restore(run_dir.checkpoints, self.tensors())
        if found is None:
            return None
        for skipped in found.skipped:
            tell("warning", text=f"checkpoint passed over: {skipped}")
        if found.extra["data"] != self.data_fingerprints:
            raise DataError(
                f"the training data is not what run '{run_dir.name}' was trained on up to step {found.step} "
                "(its fingerprint changed): restore the data, or start a new run from exported weights."
            )
        self.optimizers.set_step(found.step)
        self.model.spread()
        return found.step


def digest(model: Laid, place: Place) -> str:
    """A fingerprint of all parameters, shard by shard: equal on equal layouts exactly when every bit is equal."""
    h = xxhash.xxh3_128()
    for name, p in model.named_parameters():
        local = p.to_local() if isinstance(p, DTensor) else p
        h.update(name.encode())
        h.update(local.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    mine = torch.tensor(list(h.digest()), dtype=torch.uint8)
    if place.world == 1:
        return h.hexdigest()
    all_of_them = [torch.empty_like(mine) for _ in range(place.world)]
    dist.all_gather(all_of_them, mine)
    return xxhash.xxh3_128(bytes(torch.cat(all_of_them).tolist())).hexdigest()
