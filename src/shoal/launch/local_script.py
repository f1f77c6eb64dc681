"""What is run for a job on this machine: a script that keeps its agents."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import UsageError
from shoal.launch.request import Request

SCRIPT, ENDED = "job.sh", "ended"
# A free port is asked for by the script, not by who renders it: the same request is the same text.
_FREE_PORT = 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
_KEEP = """\
agents=() told=
tell() { told=$1; [ ${#agents[@]} = 0 ] || kill "-$1" "${agents[@]}" 2>/dev/null; }
trap 'tell TERM' TERM
trap 'tell INT' INT
trap 'tell USR2' USR2
trap 'tell TERM; sleep 0.3; tell INT; sleep 0.3; tell INT' QUIT  # at once, without saving
"""
_START = """\
[ -z "$told" ] || exit 143
set -m  # each agent in a process group of its own
"""
_WAIT = """\
[ -z "$told" ] || tell "$told"
for agent in "${agents[@]}"; do
  while wait "$agent"; kill -0 "$agent" 2>/dev/null; do :; done  # a signal ends a wait before its time
done
wait "${agents[0]}"  # all leave as the first one does
exit
"""


def folder_of(workspace: str, run: str) -> Path:
    return Path(workspace) / ".shoal" / "local" / run


def script(request: Request) -> str:
    launch, there = request.launch, Path(request.there)
    code = request.bundle.place_in(there)
    lines = [
        "#!/usr/bin/env bash",
        f"# run {request.name}, launched by Shoal on this machine: node-N.log is what its agents say",
        f"cd {shlex.quote(str(folder_of(request.there, request.name)))} || exit 78",
        f"trap 'echo \"$$ $?\" >.{ENDED} && mv .{ENDED} {ENDED}' EXIT",
        _KEEP.rstrip(),
        *_exports(request),
    ]
    if launch.setup:
        lines += ["set -e", *launch.setup, "set +e"]
    starts_in = request.there
    if len(request.bundle.files) > 1:
        starts_in = str(code / "code")
        lines.append(f'export PYTHONPATH={shlex.quote(starts_in)}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    if launch.nodes > 1:
        lines.append(f"export SHOAL_HEAD=127.0.0.1:$({shlex.join([request.python, '-c', _FREE_PORT])})")
    agent = f"cd {shlex.quote(starts_in)} && exec {shlex.join(request.agent(str(code)))}"
    before = "export SHOAL_NODE=$node"
    if launch.nodes > 1 and launch.gpus:  # else all of them would take the same GPUs
        first, last = f"$((node * {launch.gpus}))", f"$((node * {launch.gpus} + {launch.gpus - 1}))"
        before += f" CUDA_VISIBLE_DEVICES=$(seq -s, {first} {last})"
    start = (
        f"for ((node = 0; node < {launch.nodes}; node++)); do\n  {before}\n"
        f'  ({agent}) >>"node-$node.log" 2>&1 &\n  agents+=($!)\ndone\n'
    )
    return "\n".join(lines) + "\n" + _START + start + _WAIT


def _exports(request: Request) -> Iterator[str]:
    yield f"export SHOAL_JOB=local-$$ SHOAL_NODES_HERE={request.launch.nodes} PYTHONUNBUFFERED=1"
    for name, value in request.plain_env().items():
        yield f"export {name}={shlex.quote(value)}"
    for name, reference in request.launch.secrets.items():
        kind, _, what = reference.partition(":")
        if kind == "file":
            yield f'{name}="$(cat {shlex.quote(what)})" || exit 78; export {name}'
        elif kind == "kubernetes":
            raise UsageError(
                f"launch.secrets.{name} is {reference}, which only Kubernetes can look up; for this machine name "
                "`env:NAME` or `file:/path`."
            )
