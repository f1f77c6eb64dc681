"""What keeps a model from being cut over peers (`swarm.stages`), besides what `shoal.spec.drivers` refuses."""

from __future__ import annotations

from shoal.spec.run import Run

MOST_PEERS, MOST_MICRO_BATCHES = 1000, 1 << 16  # of one pipeline; of one step


def obstacle(run: Run) -> str | None:
    """A sentence without its full stop; None: it can be cut."""
    model, train, stages = run.model, run.train, run.swarm.stages
    rows = 1 if run.mesh.micro_batch == "auto" else run.mesh.micro_batch
    if model.tie_embeddings and stages.count > 1:
        return "swarm.stages cannot share an embedding between two peers: set model.tie_embeddings to false"
    if train.precision == "fp8":
        return "swarm.stages computes in fp32 or bf16: set train.precision to auto"
    if train.batch % rows:
        return f"train.batch {train.batch} is no multiple of mesh.micro_batch {rows}: change one of them"
    if train.batch // rows > MOST_MICRO_BATCHES:
        return (
            f"a step has {train.batch // rows} micro-batches, and at most {MOST_MICRO_BATCHES}: raise mesh.micro_batch"
        )
    if stages.count > model.layers:
        return f"swarm.stages.count is {stages.count}, and the model has {model.layers} layers: lower it"
    if stages.rank > model.dim:
        return f"a subspace of {stages.rank} dimensions does not fit into a model of {model.dim} (swarm.stages.rank)"
    return None
