"""What is asked of a scheduler: the run, what it needs on each node, the code, and how an agent is started there."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.errors import SpecError, UsageError
from shoal.launch.bundle import Bundle
from shoal.spec.duration import seconds
from shoal.spec.launch import Launch
from shoal.spec.run import Run

PORT = 29400  # of the head's agent; a job that shares its nodes with others takes a free one where it can
MARGIN_S = 30.0  # between the run's own grace and the scheduler's kill
BACKOFF_S = 10.0  # before the scheduler starts a failed job again; doubled each time in a row
LONGEST_BACKOFF_S = 600.0
NVIDIA_GPU = "nvidia.com/gpu"
GPU_RESOURCES = {"amd": "amd.com/gpu"}


@dataclass(frozen=True)
class Request:
    run: Run
    workspace: Path  # here
    bundle: Bundle
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)  # of this job's agents

    @property
    def launch(self) -> Launch:
        return self.run.launch

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def label(self) -> str:
        """The name as DNS and labels allow it: at most 40 small letters, digits and dashes, so that `-0-15` fits."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.run.name.lower()).strip("-")
        plain = plain if plain[:1].isalpha() else f"run-{plain}"
        return plain[:40].rstrip("-")

    @property
    def there(self) -> str:
        """The workspace on the nodes."""
        return self.launch.workspace or str(self.workspace)

    @property
    def python(self) -> str:
        return self.launch.python or ("python3" if self.launch.image else sys.executable)

    @property
    def processes(self) -> int:
        """Worker processes of each node."""
        return processes_per_node(self.run)

    @property
    def cpus(self) -> int:
        return self.launch.cpus or self.processes

    @property
    def gpu_resource(self) -> str:
        """What a Kubernetes cluster calls its GPUs: its device plug-in's word, by who makes them."""
        asked, name = self.launch.kubernetes.gpu_resource, self.launch.gpu_type or self.run.plan.on
        if asked != "auto":
            return asked
        from shoal.plan.catalogue import find  # reads files: only where it must be told apart

        try:
            return GPU_RESOURCES.get(find(name).vendor, NVIDIA_GPU) if name else NVIDIA_GPU
        except SpecError:  # a label of the cluster's own
            return NVIDIA_GPU

    @property
    def least_nodes(self) -> int:
        """A batch begins with the first that comes."""
        return 1 if self.run.batch is not None else self.launch.min_nodes or self.launch.nodes

    @property
    def time_limit_s(self) -> float | None:
        return None if self.launch.time_limit is None else seconds(self.launch.time_limit)

    @property
    def warning_s(self) -> float:
        """How long before its end (time limit, preemption) a job wants to hear of it: to save and leave."""
        return self.run.guard.grace_s + MARGIN_S

    def agent(self, code: str) -> list[str]:
        """The command of one node's agent. `code` is the folder on the node in which the bundle was unpacked."""
        return [
            self.python, "-m", "shoal.launch.agent", f"{code}/{Bundle.RUN_FILE}",
            "--workspace", self.there, "--processes", str(self.processes),
            "--min-nodes", str(self.least_nodes),
        ]  # fmt: skip

    def plain_env(self) -> dict[str, str]:
        """What every process gets and anybody may read."""
        return {"SHOAL_NODES": str(self.launch.nodes), **self.launch.env}

    def secret_env(self, of_shell: Mapping[str, str] | None = None) -> dict[str, str]:
        """The secrets of the submitting shell, by value; never rendered, never written to a file of the run."""
        of_shell = os.environ if of_shell is None else of_shell
        found = {"SHOAL_TOKEN": self.token}
        for name, reference in self.launch.secrets.items():
            kind, _, what = reference.partition(":")
            if kind != "env":
                continue
            if what not in of_shell:
                raise UsageError(f"launch.secrets.{name} is {reference}, and ${what} is not set in this shell; set it.")
            found[name] = of_shell[what]
        return found


def _processes(run: Run) -> tuple[str, int | Literal["auto"]]:
    """How many were asked for, over all nodes, and the name of that."""
    if run.script is not None:
        return "script.processes", run.script.processes
    return "resources.processes", run.resources.processes


def processes_per_node(run: Run) -> int:
    launch, (name, asked) = run.launch, _processes(run)
    if run.batch is not None:
        return run.batch.at_once if run.batch.at_once != "auto" else launch.gpus or 1
    if launch.processes != "auto":
        return launch.processes
    if launch.gpus:
        return launch.gpus
    if asked == "auto":
        return max(1, run.fleet.islands // launch.nodes)
    every = asked * run.fleet.islands
    if every % launch.nodes:
        raise SpecError(
            f"{name} {asked} cannot be spread evenly over launch.nodes {launch.nodes}; "
            "change one, or set launch.processes."
        )
    return every // launch.nodes


def check(run: Run) -> None:
    """What is wrong with the section whoever launches it."""
    launch = run.launch
    if launch.min_nodes is not None and launch.min_nodes > launch.nodes:
        raise SpecError(f"launch.min_nodes {launch.min_nodes} is more than launch.nodes {launch.nodes}; lower it.")
    islands = run.fleet.islands
    if launch.nodes > 1 and islands > 1 and islands % launch.nodes:
        raise SpecError(
            f"fleet.islands {islands} cannot be spread evenly over launch.nodes {launch.nodes}; "
            f"take {launch.nodes} or {2 * launch.nodes} islands, or other nodes."
        )
    for volume in launch.volumes:
        if (volume.claim is None) == (volume.host is None):
            raise SpecError(f"launch.volumes: the one at {volume.at} needs either `claim` or `host`; give one of them.")
    if run.batch is not None:
        return
    (name, asked), each = _processes(run), processes_per_node(run)
    world = each * launch.nodes // islands
    if asked not in ("auto", world) or world * islands != each * launch.nodes:
        whole = f"launch.nodes {launch.nodes} with {each} processes each are {each * launch.nodes}"
        of_each = "" if islands == 1 else f", which for {islands} islands are {world} each"
        raise SpecError(f"{name} is {asked}, but {whole}{of_each}; change one, or leave it out.")
    if launch.gpus and run.resources.device == "cpu":
        raise SpecError(f"launch.gpus is {launch.gpus} and resources.device is cpu; change one.")
    if not launch.gpus and run.resources.device == "cuda":
        raise SpecError("resources.device is cuda and launch.gpus is 0; say how many GPUs a node has.")
