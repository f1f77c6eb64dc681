"""Send a run to whoever starts it: Slurm, Kubernetes, Ray, or this machine in the background.

shoal launch run.yaml --on slurm launch.nodes=4 launch.gpus=8
shoal launch run.yaml --render        prints exactly what would be sent, and sends nothing

The run file's section `launch` says where and what it needs there. A run that exists goes on where it stopped, if the
run file still says the same. `shoal ps` tells what it waits for, `shoal logs -f NAME` follows it, `shoal stop NAME`
saves and ends it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from shoal.cli.options import BACKENDS, add_workspace
from shoal.cli.train import differs
from shoal.decide.load import load
from shoal.errors import SpecError
from shoal.guard.history import History
from shoal.journal.rundir import RunDir, workspace
from shoal.journal.suggested import command
from shoal.launch.backend import Rendered, backend_of
from shoal.launch.job import Job, on
from shoal.launch.own import note
from shoal.launch.request import Request
from shoal.launch.send import alone, checked, request_of, send, where_known
from shoal.spec import Run
from shoal.spec.begun import as_begun, differences

TAKES_OVERRIDES = True
_ON_ITS_NODE = (
    "script.path",
    "script.folder",
    "script.processes",
    "batch.folder",
)  # of a script: a copy of it runs there


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="RUN.yaml", help="the run file (`shoal init` writes one)")
    parser.add_argument("--on", choices=BACKENDS, help="who starts it; the same as launch.on=…")
    parser.add_argument("--render", action="store_true", help="print what would be sent, and send nothing")
    parser.add_argument("--json", action="store_true", help="the job as an object, for programs")
    parser.add_argument("--name", metavar="NAME", help="another name for the run: name=NAME")
    parser.add_argument("--follow", action="store_true", help="then follow its logs until it ends")
    add_workspace(parser)


def run(args: argparse.Namespace) -> int:
    chosen = [] if args.on is None else [f"launch.on={args.on}"]
    spec = load(args.file, [*args.overrides, *chosen]).run
    run_dir = RunDir.of(spec.name, workspace(args.workspace))
    if run_dir.exists():
        spec = as_begun(load(run_dir.spec_file).run, spec)
    before = _same(run_dir, where_known(spec, run_dir.workspace) if run_dir.exists() else spec)
    request = request_of(checked(spec, begun=before is not None and before.saved_step > 0), run_dir.workspace)
    note(spec)
    if args.render:
        print(rendered(backend_of(spec).render(request)), end="")
        return 0
    if before is not None and before.finished:
        what = "all its units are done" if spec.batch is not None else f"{before.step} steps"
        print(f"run {run_dir.name} is finished: {what}. {command('report', run_dir)} shows it.")
        return 0
    with alone(run_dir):
        job = send(request)
    tell(job, request, run_dir, args.json)
    if args.follow:
        from shoal.cli.logs import follow_job

        return follow_job(job, run_dir)
    return 0


def rendered(parts: list[Rendered]) -> str:
    """As it is sent; where there are several, each under a line that names it."""
    if len(parts) == 1:
        return parts[0].text
    return "".join(f"# --- {part.name}\n{part.text.rstrip()}\n" for part in parts)


def tell(job: Job, request: Request, run_dir: RunDir, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(job), indent=2))
        return
    launch = request.launch
    nodes, count = f"{launch.nodes} node{'s' * (launch.nodes > 1)}", launch.gpus or request.processes
    each = f"{count} GPU{'s' * (count > 1)}" if launch.gpus else f"{count} process{'es' * (count > 1)}"
    print(f"sent run {job.run} to {on(job)}: {nodes} of {each}, bundle {job.bundle[:12]}")
    print(f"{command('ps', run_dir)} says what it waits for, {command('logs -f', run_dir)} follows it")
    print(f"{command('stop', run_dir)} saves and ends it")


def _same(run_dir: RunDir, spec: Run) -> History | None:
    """What the run of that name has done so far; another run of that name is refused. Where it is launched may change
    from one start to the next."""
    if not run_dir.exists():
        return None
    differ = differences(where_known(load(run_dir.spec_file).run, run_dir.workspace), spec, auto_is_equal=True)
    if differ := [d for d in differ if not d.key.startswith("launch.") and d.key not in _ON_ITS_NODE]:
        raise SpecError(differs(run_dir.name, differ, fresh=False))
    return History.of(run_dir)
