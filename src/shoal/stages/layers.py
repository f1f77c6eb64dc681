"""One stage of a model that is cut over peers: forwards, backwards, the step, and its state. `shoal.stages` knows
it as a `Work`, whose messages are bytes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, deserialize
from safetensors.torch import save
from torch import Tensor

from shoal.codec import codec
from shoal.data.ahead import Ahead
from shoal.data.order import Order
from shoal.data.skips import Skips
from shoal.data.sources import open_sources
from shoal.data.windows import Batch, Windows
from shoal.errors import NumericsError, SpecError
from shoal.model.decoder import Decoder
from shoal.parallel.clip import clipping, squared
from shoal.parallel.flat import Flat
from shoal.parallel.laid import Laid
from shoal.parallel.place import Place
from shoal.spec.cut import obstacle
from shoal.spec.identity import identity
from shoal.spec.precision import problem
from shoal.spec.run import Run
from shoal.spec.shape import shape_of
from shoal.spec.stages import stretches
from shoal.stages.held_out import StageHeldOut
from shoal.stages.report import Measured
from shoal.stages.routes import Commit, Sums
from shoal.stages.squeeze import Squeeze
from shoal.stages.states import StageStates, saves_at
from shoal.stages.subspace import Space, confine, whole
from shoal.train.optim import Optimizers
from shoal.train.schedule import lr_ratio
from shoal.train.seed import seed_step
from shoal.train.state import State
from shoal.train.step import Step
from shoal.train.training import Tell
from shoal.values import BadValue, shown

_MEASURED = {"every", "windows", "precision"}  # of `eval`: what a stage obeys of it
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


class StageLayers:
    """Implements `shoal.stages.work.Work`. Every peer reads the data itself: only hidden states travel."""

    def __init__(
        self,
        run: Run,
        stage: int,
        folder: Path,
        device: torch.device,
        tell: Tell = lambda kind, **fields: None,
    ) -> None:
        """`tell` hears of saves, for the journal."""
        settings = run.swarm.stages
        sources = open_sources(run.data.train, run.data, folder)
        self._data = [s.fingerprint for s in sources]
        self.shape = shape_of(run.model, sources[0].vocab_size)
        model = run.model.model_copy(
            update={"vocab_size": self.shape.vocab_size}
        )  # as any run states it that has begun
        self.run, self.device = run.model_copy(update={"model": model}), device
        run = self.run
        saves_at(run)
        if wrong := obstacle(run):
            raise SpecError(f"{wrong}.")
        self._windows = Windows.of(sources, run.data)
        self._order = Order(self._windows.sizes, [s.weight for s in run.data.train], run.seed)
        self._rows = 1 if run.mesh.micro_batch == "auto" else run.mesh.micro_batch
        self.micro_batches = run.train.batch // self._rows
        self._space = Space(self.shape, settings.rank, run.seed, device) if settings.rank else None
        self._squeeze = Squeeze(settings.activations, settings.rank or self.shape.dim)
        layers = stretches(self.shape, settings.count, "1f1b", run.data.seq_len)[stage]
        self.decoder = Decoder(self.shape, layers)
        if self.decoder.last:
            self.decoder.head.z_loss = run.train.z_loss
        if self._space is not None:
            confine(self.decoder, self._space)
        self.decoder.to_empty(device=device)
        self.decoder.init_weights(run.seed)
        bf16 = run.train.precision == "bf16" or (run.train.precision == "auto" and device.type == "cuda")
        self._autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16)
        self._optimizers = Optimizers(run.train.optimizer, self.decoder.named_parameters(), run.seed)
        alone = Laid(Place(0, 1, device), (self.decoder,), self.decoder, "ring")
        self._stepping = Step(run, alone, self._optimizers)
        self.message_bytes = self._squeeze.nbytes(self._rows * run.data.seq_len)
        about = {"stage": {"number": stage + 1, "of": settings.count}} if settings.count > 1 else {}
        skips = Skips([batch, batch] for batch in run.data.skip)
        indexes = [s.index for s in sources]
        state = State(run, alone, self._optimizers, indexes, identity(run), skips=skips, besides=about)
        self._skips = skips
        self._open_held_out(folder, state, "bf16" if bf16 else "fp32", tell)
        self._flat = Flat(self.decoder.parameters())
        self._codec = codec(settings.gradients, run.swarm.chunk, run.swarm.keep)
        self._residual = np.zeros(self._flat.count, np.float32)  # what the codec left out of earlier parts
        self._left = self._residual  # the same once the running step counts
        self._sum = self._flat.empty()
        self._feed: Ahead[tuple[int, int], Batch] = Ahead(lambda key: self._made(*key), "shoal-stage-feed")
        self.part_bytes = self._codec.most_bytes(self._flat.count)
        self.state_bytes = sum(t.nbytes for t in self._tensors().values()) + (1 << 20)  # and their names
        self._states = StageStates(folder, state, self._take, self.state_bytes, tell)
        self.begin(0)

    def _open_held_out(self, folder: Path, state: State, precision: str, tell: Tell) -> None:
        run, self._held_out = self.run, None
        self.sets, self.held_out = len(run.data.eval), 0
        if wrong := problem(precision, run.eval.precision):
            raise SpecError(f"{wrong}.")
        if run.data.eval:
            sources = open_sources(run.data.eval, run.data, folder)
            windows = Windows.of(sources, run.data)
            self._data += [s.fingerprint for s in sources]
            self._held_out = StageHeldOut(run, windows, self._rows, precision, state, tell)
            self.held_out = self._held_out.count

    @property
    def fingerprint(self) -> str:
        """Of all that peers must agree on; where data lies and what computes it may differ."""
        run = self.run
        spec = [
            run.seed,
            run.model.model_dump(exclude={"weights"}),
            run.train.model_dump(exclude={"compile", "kernels"}),
        ]
        windows = run.data.model_dump(include={"seq_len", "mask_documents", "packing", "skip"})
        windows |= {"eval": [source.weight for source in run.data.eval], **run.eval.model_dump(include=_MEASURED)}
        spec += [run.swarm.stages.model_dump(), windows, self._rows, self._data, run.checkpoint.every]
        return xxhash.xxh3_128_hexdigest(json.dumps(spec, sort_keys=True).encode())

    # A step.

    def begin(self, step: int) -> None:
        self._step = step
        self._batches: dict[int, Batch] = {}
        self._feed.want([(step + i, m) for i in (0, 1) for m in range(self.micro_batches)])
        self._graphs: dict[int, tuple[Tensor | None, Tensor]] = {}  # what came in and what went out
        self._losses: dict[int, float] = {}
        seed_step(self.run.seed, step, 0)
        self._flat.forget()

    def forward(self, m: int, message: bytes | None) -> bytes | None:
        came, y = self._through(self._batch(m), message)
        if self.decoder.last:
            self._losses[m] = float(y.detach())
            y.backward()
            return self._back(came)
        self._graphs[m] = came, y
        return self._encode(y)

    def measure(self, m: int, message: bytes | None) -> tuple[bytes | None, Measured | None]:
        assert self._held_out is not None
        batch = self._held_out.batch(m)
        self.decoder.eval()
        with torch.no_grad():
            _, y = self._through(batch, message)
        self.decoder.train()
        if not self.decoder.last:
            return self._encode(y), None
        loss = float(y)
        if not math.isfinite(loss):
            raise NumericsError(f"The loss on held-out data after step {self._step} is not finite: look at data.eval.")
        return None, (m, loss, batch.target_count)

    def add_up(self, sums: Sums | None, step: int, measured: list[Measured]) -> Sums:
        assert self._held_out is not None
        return self._held_out.add_up(sums, step, measured)

    def tell(self, sums: Sums) -> None:
        assert self._held_out is not None
        self._held_out.tell(sums)

    def _through(self, batch: Batch, message: bytes | None) -> tuple[Tensor | None, Tensor]:
        """(what came in, what goes out: of the last stage the loss)."""
        tokens, positions, targets = (self._here(a) for a in (batch.tokens, batch.positions, batch.targets))
        documents = self._here(batch.documents) if batch.documents.any() else None
        came: Tensor | None = None
        x = tokens
        if message is not None:
            shape = (*tokens.shape, self._squeeze.width)
            came = self._squeeze.decode(message, shape, self.device).requires_grad_()
            x = came if self._space is None else self._space.widen(came, tokens)
        with self._autocast:
            y = self.decoder(x, positions, documents, targets if self.decoder.last else None)
        if self.decoder.last or self._space is None:
            return came, y
        return came, self._space.narrow(y.float(), tokens)

    def backward(self, m: int, message: bytes) -> bytes | None:
        came, out = self._graphs.pop(m)
        out.backward(self._squeeze.decode(message, tuple(out.shape), self.device).to(out.dtype))
        return self._back(came)

    def _back(self, came: Tensor | None) -> bytes | None:
        if came is None:
            return None
        assert came.grad is not None
        return self._encode(came.grad)

    def _encode(self, values: Tensor) -> bytes:
        try:
            return self._squeeze.encode(values)
        except FloatingPointError as e:
            raise self._no_numbers(str(e)) from e

    def _no_numbers(self, what: str) -> NumericsError:
        return NumericsError(f"In step {self._step + 1} {what}: lower train.optimizer.lr, or look at the data.")

    def check(self, kind: str, payload: bytes | memoryview) -> None:
        if kind == "part":
            self._codec.check(payload, self._flat.count)
        else:
            self._squeeze.check(payload, self._rows * self.run.data.seq_len)

    def loss(self) -> float:
        """Added up as a process adds its micro-batches, in float32 (`shoal.parallel.laid`)."""
        total = np.float32(0.0)
        for m in sorted(self._losses):
            total += np.float32(self._losses[m])
        return float(total)

    def part(self) -> bytes:
        self._left = self._residual.copy()  # a part may be made again, when there are more micro-batches in it
        try:
            return self._codec.encode(self._flat.gather(self._flat.empty()).numpy(), self._left, 1.0)
        except ValueError:  # this peer's own numbers
            raise self._no_numbers("its gradient is infinite or NaN") from None

    def total(self, parts: list[bytes] | None) -> float:
        if parts is None:
            self._flat.gather(self._sum)
            self._left = self._residual
        else:
            total = self._sum.zero_().numpy()
            for part in parts:
                self._codec.add(part, total, 1.0)
        return float(squared(self._flat.parts(self._sum)))

    def factor(self, step: int, squares: float, loss: float) -> Commit:
        if not (math.isfinite(squares) and math.isfinite(loss)):
            raise self._no_numbers("the sum of all gradients, or the loss, is not finite")
        targets = sum(self._batch(m).target_count for m in range(self.micro_batches))
        if not targets:
            raise NumericsError(f"step {step + 1} has no target token: the data's loss mask hides its whole batch.")
        total = torch.tensor(squares, dtype=torch.float64)
        norm, factor = clipping(total, 1 / targets, self.run.train.clip)
        return Commit(step, float(factor), float(np.float32(loss) / np.float32(targets)), float(norm))

    def apply(self, commit: Commit) -> None:
        self._flat.install(self._sum)
        ratio = lr_ratio(self.run.train.schedule, commit.step, self.run.steps)
        self._stepping.apply(ratio, torch.tensor(commit.factor, dtype=torch.float64, device=self.device))
        self._residual = self._left

    # Its state.

    def digest(self) -> str:
        hashed = xxhash.xxh3_128()
        for p in self.decoder.parameters():
            hashed.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return hashed.hexdigest()

    def state(self) -> bytes:
        return save({name: t.detach().cpu().contiguous() for name, t in self._tensors().items()})

    def restore(self, step: int, state: bytes) -> None:
        self._take(state)
        self._forget(step)
        self._states.goes_on_from(step)

    def _take(self, state: bytes) -> None:
        try:
            found = dict(deserialize(state))
        except SafetensorError as e:
            raise BadValue(f"no state: {shown(str(e))}") from None
        own, new = self._tensors(), dict[str, Tensor]()
        if found.keys() != own.keys():
            raise BadValue("a state of other tensors")
        for name, t in own.items():
            said = found[name]
            if (said["dtype"], list(said["shape"])) != (_DTYPES[t.dtype], list(t.shape)):
                raise BadValue("another shape or dtype", name)
            new[name] = (
                torch.frombuffer(said["data"], dtype=t.dtype).view(t.shape) if t.numel() else torch.empty_like(t)
            )
            if not torch.isfinite(new[name]).all():
                raise BadValue("it holds what is not finite", name)
        for name, values in new.items():  # all of it is good: only now is any of it taken
            own[name].copy_(values)

    def save(self, step: int) -> None:
        self._states.save(step)

    def saved(self) -> list[int]:
        return self._states.saved()

    def load(self, step: int) -> None:
        self._states.load(step)
        if not step:
            self.decoder.init_weights(self.run.seed)
            for t in self._optimizers.tensors().values():
                t.zero_()
        self._forget(step)

    def whole(self) -> dict[str, Tensor]:
        """This stage's share of a plain model."""
        return {name: t.cpu().contiguous() for name, t in whole(self.decoder, self._space).items()}

    def _forget(self, step: int) -> None:
        self._optimizers.set_step(step)
        self._residual = np.zeros_like(self._residual)

    def _tensors(self) -> dict[str, Tensor]:
        return {**{name: p.detach() for name, p in self.decoder.named_parameters()}, **self._optimizers.tensors()}

    def _batch(self, m: int) -> Batch:
        if m not in self._batches:
            self._batches[m] = self._feed.get((self._step, m))
        return self._batches[m]

    def _made(self, step: int, m: int) -> Batch:
        first = self._skips.batch_of(step) * self.run.train.batch + m * self._rows
        return self._windows.batch(*self._order.at(first, self._rows))

    def _here(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
