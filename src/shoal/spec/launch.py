"""Where `shoal launch` sends a run and what it asks for there. Training itself does not read this section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from shoal.spec.base import CountOrAuto, LocalPath, Positive, Says, Strict
from shoal.spec.duration import Duration as _Duration

Text = Annotated[str, Field(min_length=1)]
Duration = Annotated[_Duration, Says("a time such as `30 min` or `2 h`")]
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
SECRET = r"^(env:[A-Za-z_][A-Za-z0-9_]*|file:/.+|kubernetes:[a-z0-9.-]+/[A-Za-z0-9._-]+)$"
LABEL = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"

Variable = Annotated[str, Field(pattern=VARIABLE)]
# A reference, never the secret: a run file is copied, committed and mailed.
SecretRef = Annotated[str, Field(pattern=SECRET)]


def _one_line(text: str) -> str:
    if "\n" in text or "\0" in text:
        raise ValueError("it must be one line")
    return text


def _as_text(value: object) -> object:
    """`NCCL_DEBUG_LEVEL: 2` in YAML is a number, and an environment knows only text."""
    if not isinstance(value, dict):
        return value
    said = {True: "true", False: "false"}
    return {
        k: said[v] if isinstance(v, bool) else str(v) if isinstance(v, int | float) else v for k, v in value.items()
    }


Line = Annotated[str, Field(min_length=1), AfterValidator(_one_line), Says("one line of text")]
Lines = Annotated[tuple[Line, ...], Says("a list of lines")]
Pairs = Annotated[dict[Text, Text], BeforeValidator(_as_text), Says("`{NAME: value, …}`")]
Counts = Annotated[dict[Text, Positive], Says("`{NAME: count, …}`")]
Amounts = Annotated[dict[Text, Annotated[float, Field(gt=0)]], Says("`{NAME: amount, …}`")]
Environment = Annotated[
    dict[Variable, str], BeforeValidator(_as_text), Says("`{NAME: value, …}`, names of letters, digits and `_`")
]
Secrets = Annotated[
    dict[Variable, SecretRef],
    Says(
        "`{NAME: where, …}`, where the secret is: `env:NAME` (of your shell), `file:/path` (on the node) or "
        "`kubernetes:SECRET/KEY`"
    ),
]
Absolute = Annotated[str, Field(pattern=r"^/.+"), Says("a path that begins with /")]
Label = Annotated[str, Field(pattern=LABEL), Says("lower-case letters, digits, `.` and `-`")]


class Volume(Strict):
    """A place for files that outlives the job, as the nodes see it."""

    at: Absolute = Field(description="Folder in the container.")
    claim: Text | None = Field(None, description="Kubernetes: the PersistentVolumeClaim that is mounted there.")
    host: Absolute | None = Field(None, description="The node's folder that is mounted there.")
    read_only: bool = Field(False, description="Nothing may be written to it.")


Volumes = Annotated[tuple[Volume, ...], Says("a list of {at, claim or host}")]


class Slurm(Strict):
    """What only Slurm knows."""

    account: Line | None = Field(None, description="Account that is charged.")
    constraint: Line | None = Field(None, description="Features that the nodes must have.")
    exclude: Line | None = Field(None, description="Nodes that are not taken, as Slurm writes them.")
    exclusive: bool = Field(False, description="Whole nodes, nobody else on them.")
    options: Lines = Field((), description="Further options of sbatch, as they stand: `--reservation=x`.")


class Kubernetes(Strict):
    """What only Kubernetes knows."""

    context: Text | None = Field(None, description="Context of the kubeconfig; empty means the current one.")
    namespace: Label = Field("default", description="Namespace of everything.")
    jobset: bool | Literal["auto"] = Field("auto", description="A JobSet; `auto`: where the cluster knows that kind.")
    kueue: bool = Field(False, description="`launch.queue` is a LocalQueue of Kueue, which starts the job.")
    topology: Text | None = Field(
        None, description="Kueue: the node label within which all pods must lie, such as a rack's."
    )
    service_account: Label | None = Field(None, description="The pods run as it.")
    user: Positive = Field(1000, description="Number of the user and group in the pods; never root.")
    node_selector: Pairs = Field({}, description="Labels that nodes must have.")
    tolerations: Lines = Field((), description="Keys of taints that do not keep the pods away.")
    gpu_resource: Text = Field(
        "auto",
        description="What the cluster calls a GPU; `auto`: `amd.com/gpu` where launch.gpu_type or plan.on names one of "
        "AMD's, else `nvidia.com/gpu`.",
    )
    rdma: Counts = Field({}, description="RDMA devices of each pod, such as `rdma/ib: 8`; they come with IPC_LOCK.")
    shm_gb: float = Field(8.0, gt=0, description="Size of /dev/shm, which is memory.")
    pull_secret: Text | None = Field(None, description="Secret to pull the image with.")
    network_policy: bool = Field(True, description="Only the pods of this job may reach its pods.")
    metrics: bool = Field(False, description="Prometheus may read step, loss and speed at port 29401 of node 0's pod.")
    keep: Duration = Field("7 d", description="The job is removed so long after its end.")


class Ray(Strict):
    """What only Ray knows."""

    address: Text = Field(
        "auto",
        description="`auto`: this machine's cluster; http://host:8265 of another's head; `kuberay`: a RayJob manifest.",
    )
    resources: Amounts = Field({}, description="Custom resources of each node's agent.")


class Launch(Strict):
    """Where `shoal launch` sends the run, and what it asks for there. Training does not read it."""

    on: Literal["local", "slurm", "kubernetes", "ray"] = Field("local", description="Who starts it.")
    nodes: Positive = Field(1, description="Machines; there is one agent on each.")
    min_nodes: Positive | None = Field(
        None, description="It starts, and goes on after a loss, with as few as these; empty means all of them."
    )
    gpus: int = Field(0, ge=0, description="GPUs of each node; 0: it trains on the CPU.")
    gpu_type: Line | None = Field(
        None, description="Which: Slurm's gres type, Kubernetes' product label, or Ray's accelerator type."
    )
    processes: CountOrAuto = Field(
        "auto", description="Worker processes of each node; `auto`: one a GPU; else resources.processes / nodes, or 1."
    )
    cpus: Positive | None = Field(
        None,
        description="Cores of each node; empty: the GPUs' share of what the nodes have, else one a process.",
    )
    memory_gb: float | None = Field(None, gt=0, description="Memory of each node; empty: what the scheduler gives.")
    time_limit: Duration | None = Field(None, description="Of one start; the run saves before it and is started again.")
    queue: Line | None = Field(None, description="Slurm's partition, or Kueue's LocalQueue.")
    priority: Line | None = Field(None, description="Slurm's QOS, or Kubernetes' PriorityClass (with Kueue: its own).")
    requeues: int = Field(20, ge=0, description="Times in a row without progress that the scheduler starts it again.")
    env: Environment = Field({}, description="Environment of the processes.")
    secrets: Secrets = Field({}, description="Variables whose values are secrets, and where each secret is.")
    volumes: Volumes = Field((), description="Folders mounted into the containers.")
    image: Line | None = Field(None, description="Container image; Kubernetes needs one, Slurm takes it with pyxis.")
    workspace: Absolute | None = Field(
        None, description="Folder on the nodes that holds runs/, shared by all; empty: the same as here."
    )
    code: LocalPath | None = Field(
        None, description="Folder whose files travel with the run, as a bundle named after its content."
    )
    python: Line | None = Field(None, description="Python on the nodes; empty: this one, or `python3` of the image.")
    setup: Lines = Field((), description="Shell lines before it starts, such as `module load cuda`.")
    slurm: Slurm = Field(default_factory=Slurm, description="Slurm.")
    kubernetes: Kubernetes = Field(default_factory=Kubernetes, description="Kubernetes.")
    ray: Ray = Field(default_factory=Ray, description="Ray.")
