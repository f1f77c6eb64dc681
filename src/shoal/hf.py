"""Shoal's data, in Shoal's order, for the Trainer of transformers and what is built on it.

    data = shoal.hf.Data("data/train", seq_len=1024, seed=7)
    trainer = Trainer(
        model, args, train_dataset=data.train, data_collator=data.collate, callbacks=[data.order]
    )
    trainer.train(resume_from_checkpoint=...)

The dataset is endless (`max_steps` ends the run) and is nothing but places in the order: 0, 1, 2 … Accelerate deals
consecutive ones to the processes, and each turns its own into windows (`collate`). How many were used stands in the
Trainer's own checkpoint, so a run goes on with the next window, at whatever number of processes, size of batch and
accumulation. Where the sizes multiply to the same global batch, its steps read the same windows too.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from shoal.data.order import Order
from shoal.data.sources import open_sources
from shoal.data.windows import NO_TARGET, Batch, Windows
from shoal.errors import SetupError, UsageError
from shoal.journal.rundir import workspace
from shoal.spec.resolve import of_values
from shoal.spec.run import Source

Where = str | os.PathLike[str]


class Place(NamedTuple):
    """What the Trainer carries in the place of a sample: a position of the order, or a held-out window."""

    held_out: bool
    number: int


class Data:
    """Prepared token shards (`shoal data prepare`) as a Trainer wants them: `train`, `eval`, `collate` and `order`.

    `train` and `held_out` are folders, lists of folders, or lists of {path, weight}, as in a run file. `more` are other
    settings of its `data` section: mask_documents, packing, cache_dir. The same seed and data have the same order as
    `shoal train`.
    """

    def __init__(
        self,
        train: Where | Sequence[Any],
        held_out: Where | Sequence[Any] = (),
        *,
        seq_len: int,
        seed: int = 0,
        **more: Any,
    ) -> None:
        values = _plain({**more, "train": train, "eval": held_out, "seq_len": seq_len})
        model = {"preset": "tiny", "max_seq_len": seq_len}  # only the data of it is used
        said = {"name": "hf", "seed": seed, "data": values, "model": model, "train": {"steps": 1}}
        run = of_values(said, said_by="shoal.hf.Data").run
        if run.data.skip:
            raise UsageError("data.skip counts batches of a run of Shoal's own; leave it out here.")

        def windows(sources: Sequence[Source]) -> Windows:
            return Windows.of(open_sources(sources, run.data, workspace(None)), run.data)

        self._windows = windows(run.data.train)
        self._order = Order(self._windows.sizes, [s.weight for s in run.data.train], run.seed)
        self.vocab_size = self._windows.sources[0].vocab_size
        self._held_out = windows(run.data.eval) if run.data.eval else None
        about = {"seed": run.seed, "seq_len": seq_len, "windows": list(self._windows.sizes)}
        about["quotas"] = list(self._order.quotas.counts)
        self.train = Positions()
        self.eval = HeldOut(sum(self._held_out.sizes)) if self._held_out is not None else None
        self.order = ShoalOrder(self.train, about)

    def collate(self, places: Sequence[Place]) -> dict[str, Tensor]:
        """input_ids, labels and position_ids, [batch, seq_len + 1]: a model of transformers compares its logits with
        the labels one further, so that all `seq_len` targets of a window count. Where documents are masked, positions
        begin again with each, by which transformers keeps them apart; do not give an attention mask as well."""
        numbers = np.array([place.number for place in places], np.uint64)
        if not places[0].held_out:
            return _as_labels(self._windows.batch(*self._order.pick(numbers)))
        assert self._held_out is not None
        ends = np.cumsum(self._held_out.sizes)
        source = np.searchsorted(ends, numbers, side="right")
        return _as_labels(self._held_out.batch(source, numbers - (ends - self._held_out.sizes)[source]))


class Positions(IterableDataset[Place]):
    """The places of the order from `first` on."""

    def __init__(self) -> None:
        self.first = 0

    def __iter__(self) -> Iterator[Place]:
        return (Place(False, number) for number in itertools.count(self.first))


class HeldOut(Dataset[Place]):
    """All held-out windows, in their own order."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Place:
        return Place(True, number)


class ShoalOrder(TrainerCallback, ExportableState):
    """Counts the windows that were trained on, keeps the number in the Trainer's checkpoint, and begins there again.
    transformers names what it keeps by the name of the class."""

    def __init__(self, positions: Positions, about: dict[str, Any]) -> None:
        self._positions, self._about = positions, about
        self.position = 0

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.dataloader_num_workers:
            raise UsageError(
                f"dataloader_num_workers is {args.dataloader_num_workers}, and each would read all of Shoal's order; "
                "set it to 0: windows are mapped into memory, and take no time to read."
            )
        if getattr(args.accelerator_config, "split_batches", False):
            raise UsageError(
                "accelerator_config split_batches cuts batches that Shoal's order has dealt; set it to false."
            )
        started = os.environ.get("WORLD_SIZE", "1")
        if started != str(args.world_size):
            raise UsageError(
                f"{started} processes were started and this Trainer knows of {args.world_size}, so that all would "
                "train on the same windows; on CPUs set use_cpu=True."
            )
        if args.auto_find_batch_size:
            raise UsageError("auto_find_batch_size changes the batch unseen; set per_device_train_batch_size instead.")
        if args.use_cache:
            raise UsageError("use_cache lets the documents of a window see each other; set it to false.")
        parallel = getattr(args, "parallelism_config", None)
        if parallel is not None and parallel.non_data_parallel_size > 1:
            raise UsageError(
                "parallelism_config shares a batch between processes, which Shoal's order does not count; leave it out."
            )
        args.ignore_data_skip = True  # it begins at the right place: nothing is to be passed over

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        kept = state.stateful_callbacks.get(type(self).__name__)
        self.position = self._kept(kept, state.global_step) if state.global_step else 0
        self._positions.first = self.position
        state.stateful_callbacks[type(self).__name__] = self.state()  # a checkpoint without it could not be saved again

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # Not state.train_batch_size, which a resumed state has of the run before.
        self.position += args.train_batch_size * args.gradient_accumulation_steps * args.world_size

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"position": self.position, **self._about}}

    def _kept(self, kept: object, step: int) -> int:
        found = kept.get("attributes") if isinstance(kept, dict) else None
        if not isinstance(found, dict):
            raise SetupError(
                f"the checkpoint of step {step} was not trained on Shoal's order, so nobody knows where to go on; load "
                "its weights alone and begin anew."
            )
        if changed := [name for name, value in self._about.items() if found.get(name) != value]:
            raise SetupError(
                f"the checkpoint of step {step} was trained with {changed[0]} {found.get(changed[0])}, and now it is "
                f"{self._about[changed[0]]}: another order; put it back, or load its weights alone and begin anew."
            )
        position = found.get("position")
        if not isinstance(position, int) or isinstance(position, bool) or not 0 <= position < 1 << 62:
            raise SetupError(
                f"the checkpoint of step {step} says that {position!r} windows were used; take another one."
            )
        return position


def _plain(value: Any) -> Any:
    """As YAML writes it."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _as_labels(batch: Batch) -> dict[str, Tensor]:
    last = batch.targets[:, -1:]
    known = last != NO_TARGET
    tokens = np.concatenate([batch.tokens, np.where(known, last, 0)], axis=1)
    labels = np.concatenate([np.full_like(last, NO_TARGET), batch.targets], axis=1)
    positions = np.concatenate([batch.positions, np.where(known, batch.positions[:, -1:] + 1, 0)], axis=1)
    named = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    return {name: torch.from_numpy(array) for name, array in named.items()}
