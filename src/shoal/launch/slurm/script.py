"""The batch script: sbatch's options, a check of every node, one agent a node, and what follows when they have left.

Signals. Before the time limit Slurm sends USR2 to the steps (`--signal` without `B:`), at preemption TERM: the agents
save and leave with 143. The script itself is told with TERM only when Slurm is ending the job, and lives on for
KillWait seconds; USR2 reaches it from `stop`, for a job that has no step yet.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.errors import TRANSIENT, WRONG_ENVIRONMENT, SpecError, UsageError
from shoal.launch.request import BACKOFF_S, LONGEST_BACKOFF_S, Request
from shoal.launch.slurm.notes import FOLDER
from shoal.spec.duration import written

FIRST_PORT, PORTS = 20_000, 10_000  # of the heads: below those that Linux gives to outgoing connections
CHECK_S, CHECK_WITH_IMAGE_S = 300, 3600  # a node that has not answered by then is bad; an image may take long to come
LAST_WORDS_S = 60  # of the first agent, when the others have left: uploads that are behind
LONGEST_WARNING_S = 65_535  # what --signal takes


def script(request: Request) -> str:
    """Of one run."""
    about = [f"run={shlex.quote(request.name)}", f"bundle={_quoted(request.bundle.place_in(Path(request.there)))}"]
    return _whole(request, [_output(request, f"{request.name}-%j")], [*about, "job=$SLURM_JOB_ID"])


def array_script(requests: Sequence[Request], at_once: int) -> str:
    """Of many runs that ask for the same: task i is the i-th of them."""
    first = requests[0]
    for other in requests:
        if other.launch != first.launch or other.there != first.there or other.processes != first.processes:
            raise UsageError(
                f"runs '{first.name}' and '{other.name}' ask Slurm for different things, and the tasks of an array "
                "cannot; sweep over something else than launch and resources, or launch them one by one."
            )
    cases = [
        f"{i}) run={shlex.quote(r.name)} bundle={_quoted(r.bundle.place_in(Path(r.there)))} ;;"
        for i, r in enumerate(requests)
    ]
    options = [
        f"--array=0-{len(requests) - 1}%{min(at_once, len(requests))}",
        _output(first, f"{first.label}-%A_%a"),
    ]
    job = "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    return _whole(first, options, ["case $SLURM_ARRAY_TASK_ID in", *cases, "esac", job])


def batch_script(request: Request) -> str:
    """Of a batch: one task a node, each a job of its own, which begins as soon as there is one free node and is started
    again by itself. Tasks agree in the workspace on who does what."""
    nodes = request.launch.nodes
    launch = request.launch.model_copy(update={"nodes": 1})
    one = replace(request, run=request.run.model_copy(update={"launch": launch}))
    options = [f"--array=0-{nodes - 1}%{nodes}", _output(request, f"{request.name}-%A_%a")]
    about = [
        f"run={shlex.quote(request.name)}",
        f"bundle={_quoted(request.bundle.place_in(Path(request.there)))}",
        "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
        "export SHOAL_BATCH_NODE=$SLURM_ARRAY_TASK_ID SHOAL_BATCH_JOB=slurm-$SLURM_ARRAY_JOB_ID",
        f"export SHOAL_BATCH_NODES={nodes}",
    ]
    return _whole(one, options, about)


def _whole(request: Request, options: Sequence[str], about: Sequence[str]) -> str:
    _check(request)
    head = ["#!/bin/bash", *(f"#SBATCH {option}" for option in [*_options(request), *options])]
    head += [f"#SBATCH {option}" for option in request.launch.slurm.options]
    head += [f"# {request.name}, launched by Shoal: one agent a node; what follows when all have left is at the end."]
    python = shlex.quote(request.python)
    parts = [
        *head,
        *about,
        f"workspace={shlex.quote(request.there)}",
        *(f"export {name}={shlex.quote(value)}" for name, value in _environment(request)),
        _BEGIN,
        _function("prepare", _prepare(request)),
        _function("check", [_CHECK.format(python=python, asked=_asked_of_a_node(request))]),
        _function("agent", _agent(request)),
        _function("verdict", [_VERDICT.format(python=python, **_rules(request))]),
        _MIDDLE.format(
            where=" ".join(map(shlex.quote, _container(request))),
            step=" ".join(_step(request)),
            port=f"$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))",
            check_s=CHECK_S if request.launch.image is None else CHECK_WITH_IMAGE_S,
            folder=FOLDER,
        ),
        _END.format(**(_ALONE if _fewer(request) else dict.fromkeys(_ALONE, ""))),
    ]
    return "\n".join(parts)


def _options(request: Request) -> Iterator[str]:
    launch, own = request.launch, request.launch.slurm
    yield f"--job-name={request.name}"
    yield f"--chdir={_spaced(request.there)}"
    yield "--open-mode=append"
    yield "--requeue"
    yield "--export=ALL"
    if _fewer(request):
        yield f"--nodes={request.least_nodes}-{launch.nodes}"
        yield "--no-kill"  # and no --ntasks-per-node, with which Slurm gives the least (22.05)
    else:
        yield f"--nodes={launch.nodes}"
        yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={request.cpus}"
    if launch.gpus:
        yield f"--gres=gpu:{launch.gpu_type}:{launch.gpus}" if launch.gpu_type else f"--gres=gpu:{launch.gpus}"
    if launch.memory_gb is not None:
        yield f"--mem={math.ceil(launch.memory_gb * 1024)}M"
    if request.time_limit_s is not None:
        yield f"--time={_clock(request.time_limit_s)}"
    yield f"--signal=USR2@{math.ceil(request.warning_s)}"
    for name, value in (("partition", launch.queue), ("qos", launch.priority), ("account", own.account)):
        if value:
            yield f"--{name}={_spaced(value)}"
    if own.constraint:
        yield f"--constraint={_spaced(own.constraint)}"
    if own.exclude:
        yield f"--exclude={own.exclude}"
    if own.exclusive:
        yield "--exclusive"


def _check(request: Request) -> None:
    """What Slurm cannot do, said before it is asked."""
    launch = request.launch
    for volume in launch.volumes:
        if launch.image is None:
            raise SpecError(f"launch.volumes: {volume.at} needs a container, and there is no launch.image; set it.")
        if volume.claim:
            raise SpecError(f"launch.volumes: {volume.at} is a claim, which only Kubernetes knows; give `host`.")
    for name, reference in launch.secrets.items():
        if reference.startswith("kubernetes:"):
            raise SpecError(
                f"launch.secrets.{name} is {reference}, which only Kubernetes can look up; for Slurm name `env:NAME` "
                "or `file:/path`."
            )
    limit_s, warning_s = request.time_limit_s, request.warning_s
    if limit_s is not None and limit_s <= warning_s:
        raise SpecError(
            f"launch.time_limit is {launch.time_limit}, and a run is told {written(warning_s)} before it ends "
            "(guard.grace_s and 30 s) so that it can save; give it more time, or a shorter guard.grace_s."
        )
    if warning_s > LONGEST_WARNING_S:
        raise SpecError(f"guard.grace_s is longer than the {LONGEST_WARNING_S} s that Slurm can warn; lower it.")


def _environment(request: Request) -> list[tuple[str, str]]:
    plain = {name: value for name, value in request.plain_env().items() if name != "SHOAL_NODES"}
    return [("PYTHONUNBUFFERED", "1"), *plain.items()]


def _prepare(request: Request) -> list[str]:
    """What every shell of ours on a node does first. It must do no harm the second time."""
    lines = []
    for name, reference in request.launch.secrets.items():
        kind, _, path = reference.partition(":")
        if kind == "file":
            lines.append(f'{name}="$(cat {shlex.quote(path)})" || exit {WRONG_ENVIRONMENT}; export {name}')
    if any(name.startswith("code/") for name in request.bundle.files):
        lines += ['cd "$bundle/code"', 'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"']
    return [*lines, *(f"{{ {line}\n}} || exit {TRANSIENT}" for line in request.launch.setup)]


def _agent(request: Request) -> list[str]:
    command = shlex.join(request.agent("@BUNDLE@")).replace("@BUNDLE@", '"$bundle"')
    lines = ["export SHOAL_NODE=$SLURM_NODEID", "trap : USR2 TERM", command, "code=$?"]
    lines += ['[ "$SHOAL_NODE" != 0 ] || echo "$code" >"$workspace/$ended"']
    # Nobody of this job is left on the node, however its agent has ended; the memory is the next job's.
    lines += [f'{shlex.quote(request.python)} -m shoal.checkpoint.memory.give_back "$workspace/runs/$run"']
    if not _fewer(request):  # the first one is about to leave too, and a bad exit of ours would cut its last words off
        lines += [f'[ "$SHOAL_NODE" = 0 ] || [ "$code" = 0 ] || sleep {LAST_WORDS_S}']
    return [*lines, 'exit "$code"']


def _fewer(request: Request) -> bool:
    return request.least_nodes < request.launch.nodes


def _asked_of_a_node(request: Request) -> str:
    asked = f" --gpus {request.launch.gpus}" if request.launch.gpus else ""
    return asked + (f" --memory-gb {request.launch.memory_gb:g}" if request.launch.memory_gb else "")


def _rules(request: Request) -> dict[str, Any]:
    exclude = request.launch.slurm.exclude
    return {
        "requeues": request.launch.requeues,
        "backoff": f"{BACKOFF_S:g} {LONGEST_BACKOFF_S:g}",
        "more": f" --exclude {shlex.quote(exclude)}" if exclude else "",
    }


def _container(request: Request) -> list[str]:
    if request.launch.image is None:
        return []
    mounts = [f"{request.there}:{request.there}"]
    mounts += [f"{v.host}:{v.at}" + (":ro" if v.read_only else "") for v in request.launch.volumes]
    return [f"--container-image={request.launch.image}", f"--container-mounts={','.join(mounts)}"]


def _step(request: Request) -> list[str]:
    """How a lost or failed task is taken: with fewer nodes allowed, the agents that are left decide."""
    # Since 22.05 srun does not take --cpus-per-task from sbatch (its release notes).
    loss = ["--no-kill", "--kill-on-bad-exit=0"] if _fewer(request) else ["--kill-on-bad-exit=1"]
    return [f"--cpus-per-task={request.cpus}", *loss]


def _function(name: str, lines: Sequence[str]) -> str:
    """A shell text for `bash -c` on the nodes."""
    return "\n".join([f"{name}=$(cat <<'END_OF_{name.upper()}'", *lines, f"END_OF_{name.upper()}", ")"])


def _clock(seconds: float) -> str:
    """As Slurm writes it, D-HH:MM:SS; it counts in minutes and rounds up."""
    minutes, s = divmod(math.ceil(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days}-{h:02}:{m:02}:{s:02}"


def _output(request: Request, name: str) -> str:
    """Slurm replaces what follows a percent sign."""
    return f"--output={_spaced(request.there.replace('%', '%%'))}/{FOLDER}/{name}.log"


def _spaced(value: str) -> str:
    return f'"{value}"' if any(c in value for c in " #") else value


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


_BEGIN = """\
export SHOAL_JOB=$job SHOAL_NODES=$SLURM_JOB_NUM_NODES
told=0 ending= answers= settled=
trap 'told=$((told + 1))' USR2
trap 'told=$((told + 1)); ending=1' TERM"""

_CHECK = """\
why=$({python} -m shoal.launch.health --workspace "$workspace" --mark "$mark" "$text"{asked}) &&
  echo "ok $SLURMD_NODENAME" || echo "bad $SLURMD_NODENAME $why\""""

_VERDICT = """\
exec {python} -m shoal.launch.slurm.verdict --run "$run" --workspace "$workspace" --job "$job" --code "$left" \\
  --nodes "$nodes" --view "$view" --requeues {requeues} --backoff-s {backoff} \\
  ${{answers:+--answers "$answers"}}{more}"""

_MIDDLE = """\
tell() {{ local name; for name; do printf '%s=%q\\n' "$name" "${{!name}}"; done; }}  # to another shell
container=({where})
steps=(srun --nodes="$SHOAL_NODES" --ntasks="$SHOAL_NODES" --ntasks-per-node=1 {step} "${{container[@]}}")
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${{nodes%%$'\\n'*}}
getent hosts "$head" >/dev/null ||
  head=$(scontrol show node --oneliner "$head" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
port={port}
while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done  # somebody has it
export SHOAL_HEAD=$head:$port

# Is there another start? Asked once; the answer is obeyed while Slurm may already be ending this script.
judge() {{ "$@" bash -c "$(tell run bundle job workspace left nodes view answers)
$prepare
$verdict"; }}
settle() {{
  [ -z "$settled" ] || return
  settled=1 left=$1
  local here=(srun --nodes=1 --ntasks=1 --overlap "${{container[@]}}") what much without well
  local view=$(scontrol show job --oneliner "$job")
  if [ ${{#container[@]}} = 0 ]; then here=(env); fi
  read -r what much without < <(judge "${{here[@]}}")
  if [ -z "$what" ] && [ -n "$answers" ]; then  # this node is the bad one, perhaps; a good one is asked
    left=78 well=$(sed -n 's/^ok //p;T;q' <<<"$answers")
    echo "shoal: job $job: not every node passed the check before the start: $answers" >&2
    here=(srun --nodelist="$well" --nodes=1 --ntasks=1 "${{container[@]}}")
    [ -z "$well" ] || read -r what much without < <(judge "${{here[@]}}")
  fi
  trap '' TERM
  if [ "$what" = requeue ] && scontrol requeue "$job"; then
    scontrol update JobId="$job" StartTime="now+$much"
    [ -z "$without" ] || scontrol update JobId="$job" ExcNodeList="$without"
  fi
  [ "$what" != leave ] || left=$much
}}

# Files of this start. The first tells whether all nodes see the same workspace, the second how the first agent left.
text=$job-${{SLURM_RESTART_COUNT:-0}}
mark={folder}/$text.mark ended={folder}/$text.ended
rm -f "$workspace/{folder}/$job"-*.mark "$workspace/{folder}/$job"-*.ended  # of starts that were killed
echo "$text" >"$workspace/$mark"
# A signal that comes before the agent can hear it counts too.
begin="trap 'exit 143' USR2 TERM
$(tell run bundle workspace mark text ended)
$prepare
"
said=$(timeout --kill-after=10 {check_s} "${{steps[@]}}" bash -c "$begin$check")
code=$?
rm -f "$workspace/$mark"
"""

_END = """\
if [ "$told" != 0 ]; then code=143
elif [ "$(grep -c '^ok ' <<<"$said")" = "$SHOAL_NODES" ]; then
  "${{steps[@]}}" --label bash -c "$begin$agent" &
  agents=$!
{watch}\
  while heard=$told; wait $agents; code=$?; [ "$told" != "$heard" ]; do  # a signal ends a wait before its time
    [ -z "$ending" ] || settle 143
  done
{done}\
  # The first agent's code is everybody's; srun's is that of the worst, which may have been killed for leaving late.
  [ ! -s "$workspace/$ended" ] || read -r code <"$workspace/$ended"
elif [ "$code" != 143 ]; then answers=${{said:-none}} code=75
fi
rm -f "$workspace/$ended"
settle "$code"
exit "$left"
"""
# Nothing ends the others when the first one is lost, and nobody can take its place in this job.
_ALONE = {
    "watch": f"""\
  {{ until [ -s "$workspace/$ended" ]; do sleep 1; done; sleep {LAST_WORDS_S}; kill $agents; }} &
  watch=$!
""",
    "done": "  kill $watch 2>/dev/null\n",
}
