"""Short runs of every driver, and what each of them computed to the last bit: losses, gradient norms, final weights.

    python -m tests.compat.drivers OUT.json [ROW …]      in the environment of tests/compat/bits.py, which starts it

All dense rows train the same model on the same batches with the same clipping, so that rows can be compared with each
other too: where two of them are equal, a driver adds nothing of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import xxhash
from torch import Tensor

from shoal import checkpoint
from shoal.journal.rundir import RunDir
from shoal.stages.layers import StageLayers
from shoal.swarm.trainer.mesh import Mesh, Step
from tests.islands.archipelago import Archipelago
from tests.stages.toy import Pond
from tests.swarm.trainer_node import Node, paths, record
from tests.train.tiny import make_data, make_run, steps_of, train_on

STEPS, BATCH, ROUND = 6, 8, 2  # steps of a round of the swarm
BASE: dict[str, Any] = {
    "model.tie_embeddings": False,
    "train.steps": STEPS,
    "train.batch": BATCH,
    "train.clip": 0.5,  # below the norm of every step
    "train.optimizer.lr": 1e-2,
    "train.schedule.warmup_steps": 2,
    "mesh.micro_batch": 2,
}
EXPERTS = {"model.experts": {"count": 4, "top_k": 2, "ffn_dim": 32, "balance_rate": 0.01, "z_loss": 0.1}}


@dataclass(frozen=True)
class Trace:
    """What a run computed. Numbers are hexadecimal, as float.hex() writes them."""

    losses: list[str]
    norms: list[str]
    digest: str  # of all weights, whole, by name: the same for every layout that has the same weights


def digest_of(weights: Mapping[str, Tensor]) -> str:
    h = xxhash.xxh3_128()
    for name in sorted(weights):
        h.update(name.encode())
        h.update(weights[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()


def plain(folder: Path, world: int = 1, masked: bool = False, **changes: Any) -> Trace:
    data = make_data(folder / "data", masked=masked)
    return _of(train_on(make_run(data, **{**BASE, **changes}), folder, world))


def islands(folder: Path, count: int = 2, **changes: Any) -> Trace:
    """Deterministic, so that it does not matter which island computes what."""
    fleet_of = {"fleet.islands": count, "fleet.shards": 2, "fleet.deterministic": True}
    run = make_run(make_data(folder / "data"), **{**BASE, **fleet_of, **changes})
    with Archipelago(folder, run) as fleet:
        fleet.start(*range(count))
        assert set.union(*fleet.wait().values()) == {0}, fleet.logs()
        return _of(fleet.run_dir)


def swarm(folder: Path, **changes: Any) -> Trace:
    """One peer, with a node that says what a real one would; its rounds are of so many samples, not of so many
    seconds, and each record comes before the next round begins."""
    alone = {"swarm.peers": 1, "swarm.batch": BATCH, "resources.processes": 1, "mesh.pp": 1}
    run = make_run(make_data(folder / "data"), **{**BASE, **alone, "name": "swarm", **changes})
    samples = ROUND * BATCH
    with _inner_steps(folder / "steps.jsonl") as told:
        node = Node("peer", run, folder)
        with node.trainer():
            node.say("fresh", seed=run.seed)
            node.hear("loaded")
            for n in range(STEPS // ROUND):
                node.begin(n + 1, n * samples, samples, done=n * samples)
                parts = {node.peer: node.hear("part")}  # handed in when its samples are used up
                node.say("apply", record=record(n + 1, parts, done=(n + 1) * samples), parts=paths(parts))
                node.hear("applied")
            node.say("stop")
            assert [o.status for o in node.ranks.outcomes()] == [0]
        node.close()
        steps = told()
    return Trace([s["loss"] for s in steps], [s["norm"] for s in steps], digest_of(_saved(node.run_dir)))


def stages(folder: Path, count: int = 1, **changes: Any) -> Trace:
    """One peer for each stage, over real connections."""
    cut = {"swarm.stages": {"count": count, "activations": "fp32"}}
    run = make_run(make_data(folder / "data"), **{**BASE, **cut, **changes})

    async def train() -> Trace:
        micro_batches = BATCH // int(run.mesh.micro_batch)
        pond = Pond([1] * count, micro_batches, STEPS, lambda s, p: StageLayers(run, s, folder / p[:8], CPU))
        for stage in pond.layout:
            await pond.start(stage[0])
        for peer in pond.peers:
            pond.run(peer)
        async with asyncio.timeout(600):
            await asyncio.gather(*pond.tasks.values())
        await pond.close()
        steps = [e for p, kind, e in pond.events if kind == "step" and p == pond.layout[0][0]]
        weights = {name: t for work in pond.works.values() for name, t in work.whole().items()}
        return Trace(_hex(s["loss"] for s in steps), _hex(s["grad_norm"] for s in steps), digest_of(weights))

    return asyncio.run(train())


CPU = torch.device("cpu")
Row = Callable[[Path], Trace]
ROWS: dict[str, Row] = {
    "plain": plain,
    "plain dp_shard 2": lambda f: plain(f, 2, **{"mesh.dp_shard": 2}),
    "plain tp 2": lambda f: plain(f, 2, **{"mesh.tp": 2, "mesh.micro_batch": 8}),
    "plain pp 2": lambda f: plain(f, 2, **{"mesh.pp": 2, "mesh.schedule": "1f1b"}),
    "plain experts ep 2": lambda f: plain(f, 2, **EXPERTS, **{"mesh.dp_shard": 2, "mesh.ep": 2}),
    "plain dp_replicate 2, masked, packed": lambda f: plain(
        f, 2, masked=True, **{"mesh.dp_replicate": 2, "data.seq_len": 64, "data.packing": "best-fit"}
    ),
    "plain muon": lambda f: plain(f, **{"train.optimizer.name": "muon"}),
    "islands 2 x 1": islands,
    "swarm, one peer": swarm,
    "stages, one": stages,
    "stages, two": lambda f: stages(f, 2),
}


@contextmanager
def _inner_steps(file: Path) -> Iterator[Callable[[], list[dict[str, str]]]]:
    """A swarm's journal has one record a round, with a rounded loss: its inner steps are listened to."""
    taken = Mesh.step

    def noted(self: Mesh, *args: Any) -> Step:
        step = taken(self, *args)
        with open(file, "a") as f:
            f.write(json.dumps({"loss": step.loss.hex(), "norm": step.grad_norm.hex()}) + "\n")
        return step

    with patch.object(Mesh, "step", noted):
        yield lambda: [json.loads(line) for line in file.read_text().splitlines()]


def _of(run_dir: RunDir) -> Trace:
    steps = steps_of(run_dir)
    return Trace(_hex(r["loss"] for r in steps), _hex(r["grad_norm"] for r in steps), digest_of(_saved(run_dir)))


def _saved(run_dir: RunDir) -> Mapping[str, Tensor]:
    found = checkpoint.newest(run_dir.checkpoints)
    assert found is not None
    assert found.step == STEPS
    return checkpoint.read_full(found)


def _hex(numbers: Any) -> list[str]:
    return [float(n).hex() for n in numbers]


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    found = {}
    for name in names or ROWS:
        with tempfile.TemporaryDirectory(prefix="shoal-bits-") as folder:
            found[name] = asdict(ROWS[name](Path(folder)))
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
