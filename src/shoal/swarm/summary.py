"""What a machine will run, read, write and send if it joins a swarm, for the person who decides about it."""

from __future__ import annotations

from shoal.codec import codec
from shoal.readable import count, size
from shoal.spec.run import Run
from shoal.spec.shape import shape_of
from shoal.swarm.charter import Charter, Input, Where
from shoal.swarm.config import NodeConfig
from shoal.swarm.outer.rule import Rule

WEIGHT_BYTES = 4


def lines(charter: Charter, run: Run, config: NodeConfig, peers: int, here: dict[str, Where]) -> list[str]:
    """`here`: inputs that are on this machine already, or that it was allowed to read elsewhere."""
    told = [
        ("run", _run(run, config)),
        ("read", "; ".join(_input(i, here.get(i.place)) for i in charter.inputs)),
        ("write", _write(run, config)),
        ("send", _send(run, peers)),
    ]
    head = f"{charter.name} (swarm {charter.swarm[:12]}, organiser {charter.organiser[:12]}) asks this machine to"
    return [head, *(f"  {word:<6} {text}" for word, text in told)]


def _run(run: Run, config: NodeConfig) -> str:
    m, train = run.model, run.train
    if not config.train:
        return "nothing: with --no-train it only passes on what others need"
    more = " and its vocabulary's" if m.vocab_size == "auto" else ""
    tokens = run.steps * train.batch * run.data.seq_len
    code = "with " + " ".join(config.trainer) if config.trainer else "with the Shoal that is installed here"
    return (
        f"a {m.family} of {count(_params(run))} parameters{more} ({m.layers} layers of {m.dim}), {count(run.steps)} "
        f"steps of {train.batch} windows of {run.data.seq_len}, {count(tokens)} tokens by all peers, {_how(run)}; "
        f"{code}, no code comes over the network"
    )


def _how(run: Run) -> str:
    stages = run.swarm.stages.count
    if stages == 1:
        return f"in rounds of {run.swarm.round}"
    return f"of which it computes one of {stages} stages of layers in every step"


def _input(wanted: Input, here: Where | None) -> str:
    if wanted.address:
        return f"{wanted.address}, with this machine's credentials{'' if here else ' (not allowed yet: --allow)'}"
    if here is not None:
        return f"{here}"
    if not wanted.folder:
        return f"the data set {wanted.fingerprint[:16]}, which you bring (--data)"
    return f"{wanted.place}, {size(wanted.bytes)} from the peers"


def _write(run: Run, config: NodeConfig) -> str:
    stages = run.swarm.stages.count
    # Of a whole model the weights; a stage saves its part of them with two moments of the optimizer.
    saved = size(_params(run) * WEIGHT_BYTES if stages == 1 else 3 * _params(run) * WEIGHT_BYTES // stages)
    track = run.track
    mlflow = f"MLflow at {track.mlflow}" if isinstance(track.mlflow, str) else "MLflow in the workspace"
    wandb = f"Weights & Biases ({track.wandb})"
    named = [
        *([mlflow] if track.mlflow else []),
        *([wandb] if track.wandb != "off" else []),
        *(["TensorBoard"] if track.tensorboard else []),
    ]
    mirrored = named and stages == 1  # a stage's journal is mirrored nowhere
    trackers = f"; its numbers also to {', '.join(named)}" if mirrored else "; its numbers to no tracker"
    return f"{config.run_dir.path}: keys, data, journal, {run.checkpoint.keep} checkpoints of {saved}{trackers}"


def _send(run: Run, peers: int) -> str:
    if run.swarm.stages.count > 1:
        stages = run.swarm.stages
        values = (stages.rank or run.model.dim) * run.data.seq_len * run.train.batch
        return (
            f"to {peers} peer{'s' * (peers != 1)} now, and to {run.swarm.peers} or more from the first step on: up to "
            f"{count(values)} numbers of hidden states a step ({stages.activations}) and as many of their gradients, "
            "its summed gradient and its state to peers of the same stage, the data, and this machine's addresses and "
            "name"
        )
    rule = Rule.of(run.swarm)
    part = codec(rule.codec, rule.chunk, rule.keep).most_bytes(-(-_params(run) // rule.fragments))
    return (
        f"to {peers} peer{'s' * (peers != 1)} now, and to all who join later: up to {size(part)} of changes to the "
        "weights each round, the swarm's history and data, and this machine's addresses, name and speed"
    )


def _params(run: Run) -> int:
    return shape_of(run.model, 1).params
