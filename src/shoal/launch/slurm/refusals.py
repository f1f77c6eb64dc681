"""Why sbatch did not take a job, as one sentence that names the key of the run file to change."""

from __future__ import annotations

from shoal.errors import SetupError, ShoalError, SpecError, TransientError
from shoal.launch.request import Request

# By what sbatch says (Slurm 22.05 to 25.05, slurm_errno.c), in small letters; the first that is found counts.
_SAYS: tuple[tuple[str, str], ...] = (
    ("invalid partition", "the cluster has no partition '{queue}' (launch.queue); `sinfo -s` lists them"),
    ("no partition specified", "the cluster has no default partition; set launch.queue (`sinfo -s` lists them)"),
    (
        "invalid account",
        "you may not charge account '{account}' in partition '{queue}'; set launch.slurm.account "
        "(`sacctmgr show associations user=$USER` lists yours) or another launch.queue",
    ),
    (
        "invalid qos",
        "you may not use the QOS '{priority}' (launch.priority) with that account and partition; change it",
    ),
    (
        "invalid feature",
        "no node has the features '{constraint}' (launch.slurm.constraint); `sinfo -o '%f %D'` lists what there is",
    ),
    (
        "invalid generic resource",
        "no node has GPUs of that kind ({gpus}); `sinfo -o '%G %D'` lists what there is: change launch.gpu_type or "
        "launch.gpus",
    ),
    ("invalid gres", "no node has GPUs of that kind ({gpus}); `sinfo -o '%G %D'` lists what there is"),
    ("invalid node name", "launch.slurm.exclude or an option names a node that the cluster does not have; mend it"),
    (
        "requested time limit is invalid",
        "launch.time_limit {time} is longer than partition '{queue}' allows, or missing where it wants one; "
        "`sinfo -o '%P %l'` lists the limits: shorten it, the run saves and is started again",
    ),
    ("memory specification", "launch.memory_gb {memory} is more than any node of the partition has; lower it"),
    (
        "requested node configuration is not available",
        "no {nodes} of partition '{queue}' have what is asked of each ({each}); `sinfo -o '%D %c %m %G %f'` lists what "
        "there is: ask for less or for another launch.queue",
    ),
    (
        "requested partition configuration not available",
        "partition '{queue}' is not open to such a job now ({each}, {nodes}); ask for less, or another launch.queue",
    ),
    ("node count specification invalid", "partition '{queue}' does not have {nodes}; lower launch.nodes"),
    ("more processors requested than permitted", "{each} on {nodes} is more than you may have; ask for less"),
    ("not permitted to use this partition", "you may not use partition '{queue}'; set another launch.queue"),
    ("access/permission denied", "Slurm does not let you submit to partition '{queue}'; ask those who run the cluster"),
    (
        "job array specification",
        "the sweep is larger than the cluster's arrays may be (MaxArraySize); launch fewer at once",
    ),
    ("unrecognized option", "sbatch does not know an option of launch.slurm.options ({said}); mend it"),
    ("invalid option", "sbatch does not know an option of launch.slurm.options ({said}); mend it"),
    ("unable to open file", "sbatch could not read what it was given ({said}); try again"),
)
_FULL = ("submitjob", "submit limit", "policy", "job violates")


def refusal(said: str, request: Request) -> ShoalError:
    launch, own = request.launch, request.launch.slurm
    plain = said.lower()
    told = _first_reason(said)
    gpus = f"{launch.gpus} of type {launch.gpu_type}" if launch.gpu_type else f"{launch.gpus}"
    each = [f"{request.cpus} cores"]
    each += [f"{launch.memory_gb:g} GB"] if launch.memory_gb else []
    each += [f"{gpus} GPUs"] if launch.gpus else []
    values = {
        "queue": launch.queue or "the default one",
        "account": own.account or "the default one",
        "priority": launch.priority or "the default one",
        "constraint": own.constraint or "of launch.slurm.options",
        "gpus": gpus,
        "time": launch.time_limit or "(none)",
        "memory": f"{launch.memory_gb or 0:g}",
        "nodes": f"{launch.nodes} node{'s' * (launch.nodes > 1)}",
        "each": ", ".join(each),
        "said": told,
    }
    for sign, sentence in _SAYS:
        if sign in plain:
            return SpecError(f"Slurm refused the job: {sentence.format(**values)}.")
    if any(sign in plain for sign in _FULL):
        return TransientError(
            f"Slurm refused the job because a limit of your account or QOS is reached ({told}); wait until some of "
            "your jobs have ended, or ask for less."
        )
    return SetupError(f"Slurm refused the job: {told.rstrip('.')}; `shoal launch --render` prints what was sent.")


def _first_reason(said: str) -> str:
    """Without sbatch's own prefixes."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in said.splitlines() if line.strip()]
    return next((line for line in lines if line), "it gave no reason")
