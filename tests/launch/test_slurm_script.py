"""The batch script: what it asks of Slurm, what it never shows, and what it does when its agents have left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.patience import Stopwatch, limit
from tests.train.tiny import make_run

from shoal.checkpoint.memory.ram import hold, memory_folder
from shoal.errors import SpecError, UsageError
from shoal.launch.bundle import Bundle
from shoal.launch.request import Request
from shoal.launch.slurm import notes
from shoal.launch.slurm.script import array_script, script


def request(workspace: Path = Path("/ws"), **changes: Any) -> Request:
    run = make_run(Path("/data"), **{"name": "demo", "launch.on": "slurm", **changes})
    return Request(run, workspace, Bundle.of("run", None), token="ab" * 32)


def options(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, re.M)


def test_what_is_asked_of_slurm() -> None:
    asked = {
        "launch.nodes": 4, "launch.gpus": 8, "launch.gpu_type": "h100", "launch.memory_gb": 512, "launch.cpus": 96,
        "launch.time_limit": "26 h", "launch.queue": "gpu", "launch.priority": "urgent", "resources.device": "cuda",
        "launch.slurm": {"account": "lab", "constraint": "ib & a", "exclude": "n9", "exclusive": True,
                         "options": ["--reservation=x"]},
    }  # fmt: skip
    text = script(request(**asked))
    assert set(options(text)) >= {
        "--job-name=demo", "--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=96", "--gres=gpu:h100:8",
        "--mem=524288M", "--time=1-02:00:00", "--signal=USR2@90", "--partition=gpu", "--qos=urgent", "--account=lab",
        '--constraint="ib & a"', "--exclude=n9", "--exclusive", "--reservation=x", "--requeue", "--open-mode=append",
        "--output=/ws/.shoal/slurm/demo-%j.log",
    }  # fmt: skip
    assert "--cpus-per-task=96 --kill-on-bad-exit=1" in text  # srun does not take it from sbatch
    assert "--gpus 8 --memory-gb 512" in text  # what a node is checked for
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_fewer_nodes_are_enough() -> None:
    text = script(request(**{"launch.nodes": 4, "launch.min_nodes": 2}))
    assert {"--nodes=2-4", "--no-kill"} <= set(options(text))
    assert "--ntasks-per-node=1" not in options(text)  # with it Slurm would give two
    assert "--kill-on-bad-exit=0" in text
    assert "SHOAL_NODES=$SLURM_JOB_NUM_NODES" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_secrets_are_not_in_it_and_images_go_to_pyxis() -> None:
    one = request(
        **{
            "launch.image": "registry#team/shoal:1",
            "launch.secrets": {"HF_TOKEN": "env:MY_TOKEN", "KEY": "file:/etc/a key"},
            "launch.volumes": [{"at": "/in", "host": "/lustre/in", "read_only": True}],
        }
    )
    text = script(one)
    assert one.token not in text
    assert "HF_TOKEN" not in text
    assert "KEY=\"$(cat '/etc/a key')\" || exit 78; export KEY" in text
    assert "'--container-image=registry#team/shoal:1' --container-mounts=/ws:/ws,/lustre/in:/in:ro" in text
    assert one.secret_env({"MY_TOKEN": "s"})["HF_TOKEN"] == "s"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"launch.time_limit": "1 min"}, "launch.time_limit is 1 min, and a run is told 90 s before"),
        ({"launch.volumes": [{"at": "/a", "host": "/b"}]}, "needs a container"),
        ({"launch.volumes": [{"at": "/a", "claim": "b"}], "launch.image": "x"}, "which only Kubernetes knows"),
        ({"launch.secrets": {"A": "kubernetes:a/b"}}, "which only Kubernetes can look up"),
    ],
)
def test_what_slurm_cannot_do_is_said_before_it_is_asked(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        script(request(**wrong))


def test_a_node_is_left_without_what_the_run_held_in_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its agent has ended: the shell around it is what outlives it."""
    monkeypatch.setenv("SHOAL_MEMORY", str(tmp_path / "ram"))
    held = hold(memory_folder(tmp_path / "runs" / "demo", 3))
    held.close()
    found = re.search(r"agent=\$\(cat <<'END_OF_AGENT'\n(.*?)END_OF_AGENT", script(request(tmp_path)), re.S)
    assert found is not None
    killed = re.sub(r"^.*shoal\.launch\.agent.*$", "bash -c 'kill -9 $$'", found[1], flags=re.M)
    assert killed != found[1]
    told = f"run=demo workspace={tmp_path} ended=ended SLURM_NODEID=0"
    done = subprocess.run(["bash", "-c", f"{told}\n{killed}"], capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 128 + signal.SIGKILL
    assert (tmp_path / "ended").read_text() == "137\n"
    assert not held.folder.exists()


def test_an_array_is_one_script_with_a_name_and_a_bundle_for_each_task() -> None:
    runs = [request(name=f"r{i}") for i in range(3)]
    text = array_script(runs, at_once=2)
    assert "--array=0-2%2" in options(text)
    assert re.search(r"^1\) run=r1 bundle=/ws/\.shoal/bundles/\w+ ;;$", text, re.M)
    assert "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" in text  # the bare id of a task may name the whole array
    with pytest.raises(UsageError, match="'r0' and 'wide' ask Slurm for different things"):
        array_script([*runs, request(name="wide", **{"launch.nodes": 2})], 2)


SRUN = """\
#!/bin/bash
# The last arguments are `bash -c TEXT`; the check is answered as the test says, an agent is what the test says.
text=${@: -1}
if [[ $text == *shoal.launch.health* ]]; then cat answers; exit; fi
exec bash -c "$(cat agent)"
"""
SCONTROL = """\
#!/bin/bash
case "$1 $2" in
  "show hostnames") tr , '\\n' <<<"$3" ;;
  "show job") cat view ;;
  "show node") echo NodeAddr=10.0.0.1 ;;
  *) echo "$@" >>asked ;;
esac
"""


class Bench:
    """The real script under a srun and a scontrol of ours, for what a real Slurm does too rarely to wait for."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = folder
        one = request(folder, **{"launch.nodes": 2, "launch.python": sys.executable, **changes})
        (folder / notes.FOLDER).mkdir(parents=True)
        (folder / "job.sbatch").write_text(script(one))
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (folder / "bin").mkdir(exist_ok=True)
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def start(self, agent: str, answers: str = "ok n1\nok n2\n", view: str = "JobState=RUNNING Requeue=1") -> Any:
        for name, text in {"agent": agent, "answers": answers, "view": view, "asked": ""}.items():
            (self.folder / name).write_text(text)
        env = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        env |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n1,n2"}
        return subprocess.Popen(["bash", "job.sbatch"], cwd=self.folder, env=env, stderr=subprocess.PIPE, text=True)

    def run(self, *said: str, **more: str) -> tuple[int, list[str], str]:
        process = self.start(*said, **more)
        _, err = process.communicate(timeout=limit(60))
        return process.returncode, (self.folder / "asked").read_text().splitlines(), err


def test_a_crash_is_started_again_later_and_later_and_not_for_ever(tmp_path: Path) -> None:
    bench = Bench(tmp_path, **{"launch.requeues": 2})
    assert bench.run("exit 75")[:2] == (75, ["requeue 7", "update JobId=7 StartTime=now+10"])
    assert bench.run("exit 137")[1] == ["requeue 7", "update JobId=7 StartTime=now+20"]
    code, asked, err = bench.run("exit 75")
    assert (code, asked) == (75, [])
    assert "it is over: 2 starts in a row made no progress (launch.requeues 2); the last left with 75" in err


def test_the_first_agents_code_counts_not_that_of_one_killed_for_leaving_late(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.run(f"echo 78 >{notes.FOLDER}/7-0.ended; exit 143")[:2] == (78, [])
    assert not list((tmp_path / notes.FOLDER).glob("*.ended"))


def test_bad_nodes_are_excluded_with_those_of_the_run_file(tmp_path: Path) -> None:
    bench = Bench(tmp_path, **{"launch.slurm": {"exclude": "x[1-3]"}})
    code, asked, err = bench.run("exit 0", answers="ok n1\nbad n2 8 GPUs were asked for and 7 can be seen\n")
    assert code == 75
    assert asked == ["requeue 7", "update JobId=7 StartTime=now+5", "update JobId=7 ExcNodeList=x[1-3],n2"]
    assert "n2: 8 GPUs were asked for and 7 can be seen" in err
    code, asked, _ = bench.run("exit 0", answers="bad n1 no disk\nbad n2 no disk\n")
    assert (code, asked) == (78, [])


def test_a_cancelled_job_is_left_alone_and_one_whose_time_is_up_is_not(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.run("exit 143", view="JobState=COMPLETING Reason=None Requeue=1")[:2] == (143, [])
    assert bench.run("exit 143", view="JobState=RUNNING Reason=None Requeue=0")[:2] == (143, [])
    # Slurm ends the script itself: the requeue is asked for at once, and the agents are still waited for.
    saved = tmp_path / "saved"
    process = bench.start(f"touch up; sleep 2; touch {saved}; exit 143", view="JobState=COMPLETING Reason=TimeLimit")
    watch = Stopwatch()
    while not (tmp_path / "up").exists():
        assert watch.quiet_s() < 30
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(limit(30)) == 143
    assert saved.exists()
    assert (tmp_path / "asked").read_text().splitlines() == ["requeue 7", "update JobId=7 StartTime=now+45"]
