"""Slurm as a scheduler: what `shoal launch`, `ps`, `logs` and `stop` call."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shoal.errors import SetupError, ShoalError, UsageError
from shoal.launch.backend import OVER, Rendered, State
from shoal.launch.job import Job
from shoal.launch.request import Request
from shoal.launch.slurm import states
from shoal.launch.slurm.commands import Refused, ask
from shoal.launch.slurm.cores import with_cores
from shoal.launch.slurm.notes import FOLDER
from shoal.launch.slurm.refusals import refusal
from shoal.launch.slurm.script import array_script, batch_script, script
from shoal.observe.logs import Reader

LOOK_EVERY_S = 0.5
ASK_EVERY_S = 10.0  # how often a follower asks whether the job is over: squeue costs the controller something
_LABEL = re.compile(r"^ *(\d+): ")  # srun's, of the node
_GONE = ("invalid job id", "already completing or completed", "job/step already")


class Slurm:
    name = "slurm"

    def render(self, request: Request) -> list[Rendered]:
        return [Rendered("job.sbatch", _text(*with_cores([request])))]

    def submit(self, request: Request) -> Job:
        (request,) = with_cores([request])
        text, secrets = _text(request), request.secret_env()
        _place([request])
        return _job(request, _sbatch(text, secrets, request))

    def render_array(self, requests: Sequence[Request], at_once: int) -> list[Rendered]:
        """What `submit_array` sends; more than the cluster's MaxArraySize become several of them."""
        return [Rendered("array.sbatch", array_script(with_cores(requests), at_once))]

    def submit_array(self, requests: Sequence[Request], at_once: int) -> list[Job]:
        """Many runs as one job array, `at_once` of them at a time; the jobs in the order of the requests.

        They must ask Slurm for the same things. Secrets and the agents' token are those of the first. More than the
        cluster's MaxArraySize become several arrays, each of which waits for the one before it.
        """
        if not requests:
            return []
        requests = with_cores(requests)
        size, jobs, before = _most_tasks(), list[Job](), list[str]()
        texts = [array_script(requests[i : i + size], at_once) for i in range(0, len(requests), size)]
        secrets = requests[0].secret_env()
        _place(requests)
        for i, text in enumerate(texts):
            array = _sbatch(text, secrets, requests[0], [f"--dependency=afterany:{before[-1]}"] if before else [])
            before.append(array)
            part = requests[i * size : (i + 1) * size]
            jobs += [_job(request, f"{array}_{task}") for task, request in enumerate(part)]
        return jobs

    def states(self, jobs: Sequence[Job]) -> Mapping[str, State]:
        return states.of_all(jobs) if jobs else {}

    def logs(self, job: Job, follow: bool, lines: int | None) -> Iterator[str]:
        """Of all starts: the file is appended to."""
        path = self._log(job, follow)
        if path is None:
            return
        reader = Reader("", path, 0)
        said = [_of_node(line) for line in reader.new_lines(flush=not follow)]
        yield from said if lines is None else said[max(0, len(said) - lines) :]
        asked = 0.0
        while follow:
            over = False
            if time.monotonic() - asked > ASK_EVERY_S:
                over = self.states([job])[job.id].phase in OVER
                asked = time.monotonic()
            yield from map(_of_node, reader.new_lines(flush=over))
            if over:
                return
            time.sleep(LOOK_EVERY_S)

    def stop(self, job: Job, now: bool) -> None:
        """Slurm's own flag keeps the job from being requeued, by us or by Slurm; then it is told, or ended."""
        if tasks := states.tasks_of(job):  # of a batch: each is a job
            said = states.states(tasks)
            for task in tasks:
                if said[task.id].phase not in OVER:
                    self.stop(task, now)
            return
        waits = self.states([job])[job.id].phase == "waiting"
        try:
            if now or waits:
                ask(["scancel", job.id])
                return
            ask(["scontrol", "update", f"JobId={job.id}", "Requeue=0"])
            ask(["scancel", "--signal=USR2", job.id])
            ask(["scancel", "--batch", "--signal=USR2", job.id])  # in case it has no step yet
        except Refused as e:
            if not any(sign in str(e).lower() for sign in _GONE):  # else it has just ended by itself
                raise SetupError(f"Slurm does not stop job {job.id}: {str(e).splitlines()[-1]}.") from e

    def _log(self, job: Job, follow: bool) -> Path | None:
        """Where it prints; for a follower as soon as it does."""
        folder = Path(job.workspace) / FOLDER
        if not folder.is_dir():
            raise SetupError(
                f"{folder}, where job {job.id} writes its log, cannot be seen from here; go to a login node."
            )
        asked = time.monotonic()
        id_ = next((task.id for task in states.tasks_of(job)), job.id)  # of a batch: the first task's
        while not (found := sorted(folder.glob(f"*-{id_}.log"))):
            if not follow or (time.monotonic() - asked > ASK_EVERY_S and self.states([job])[job.id].phase in OVER):
                return None
            time.sleep(LOOK_EVERY_S)
        return found[0]


def _text(request: Request) -> str:
    return script(request) if request.run.batch is None else batch_script(request)


def _sbatch(text: str, secrets: Mapping[str, str], request: Request, more: Sequence[str] = ()) -> str:
    try:
        said = ask(["sbatch", "--parsable", *more], text, {**_environment(text), **secrets})
    except Refused as e:
        raise refusal(str(e), request) from e
    return said.strip().partition(";")[0]


def _environment(text: str) -> dict[str, str]:
    """This shell's, less what would change the job: sbatch lets SBATCH_… overrule a script, and what a shell within a
    job knows of that job would be passed on to the new one."""
    ours = {"SBATCH_TIMELIMIT"} if "#SBATCH --time=" in text else set()
    ours |= {f"SBATCH_{name.upper().replace('-', '_')}" for name in re.findall(r"^#SBATCH --([a-z-]+)", text, re.M)}
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {
        k: v
        for k, v in os.environ.items()
        if k not in ours and (k in kept or not k.startswith(("SLURM_", "SHOAL_JOB")))
    }


def _place(requests: Sequence[Request]) -> None:
    """The code and the folder of the logs, where the nodes see them."""
    there = Path(requests[0].there)
    if not there.is_dir():
        raise UsageError(
            f"the workspace {there} is not on this machine; launch from a login node that shares it with the nodes, or "
            "set launch.workspace to a folder that both see."
        )
    for request in requests:
        request.bundle.unpack_into(there)
    try:
        (there / FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise SetupError(f"cannot write {there / FOLDER} ({e.strerror}); mend that, or name another workspace.") from e


def _job(request: Request, id_: str) -> Job:
    launch, bundle = request.launch, request.bundle.sha256
    where = {"tasks": str(launch.nodes)} if request.run.batch is not None else {}
    return Job(request.name, Slurm.name, id_, time.time(), launch.nodes, launch.gpus, request.there, bundle, where)


def _most_tasks() -> int:
    try:
        found = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask(["scontrol", "show", "config"]), re.M)
    except Refused as e:
        raise ShoalError(f"Slurm does not tell its configuration ({e}); try again later.") from e
    return max(1, int(found[1])) if found else 1001  # Slurm's default


def _of_node(line: str) -> str:
    """`1: text` of srun becomes `[1] text`; what the batch script says has no node."""
    line = line.removeprefix("[] ")
    return _LABEL.sub(lambda found: f"[{found[1]}] ", line)
