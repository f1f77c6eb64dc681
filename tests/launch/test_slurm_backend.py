"""What is handed to sbatch and scancel: by stand-ins that write it down. tests/clusters has the real ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.launch.test_slurm_script import request

from shoal.errors import SetupError, TransientError, UsageError
from shoal.launch.job import Job
from shoal.launch.slurm.backend import Slurm

SBATCH = """\
#!/bin/bash
n=$(ls "$SEEN" | grep -c script); cat >"$SEEN/script-$n"; echo "$@" >"$SEEN/arguments-$n"; env >"$SEEN/env-$n"
echo $((n + 40))
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder, programs = tmp_path / "seen", tmp_path / "bin"
    for one in (folder, programs):
        one.mkdir()
    put(programs / "sbatch", SBATCH)
    put(programs / "scontrol", "#!/bin/sh\necho 'MaxArraySize            = 2'\n")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("SEEN", str(folder))
    return folder


def put(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_secrets_travel_in_the_environment_and_the_script_is_what_was_rendered(
    seen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MY_TOKEN": "hush", "SBATCH_PARTITION": "other", "SLURM_JOB_ID": "9"}.items():
        monkeypatch.setenv(name, value)
    asked = request(tmp_path, **{"launch.secrets": {"HF_TOKEN": "env:MY_TOKEN"}, "launch.queue": "gpu"})
    job = Slurm().submit(asked)
    assert (job.id, job.workspace) == ("40", str(tmp_path))
    script, env = (seen / "script-0").read_text(), (seen / "env-0").read_text().splitlines()
    assert [script] == [part.text for part in Slurm().render(asked)]
    assert "hush" not in script
    assert {"HF_TOKEN=hush", f"SHOAL_TOKEN={asked.token}"} <= set(env)
    assert not [line for line in env if line.startswith(("SBATCH_PARTITION", "SLURM_JOB_ID"))]
    assert (asked.bundle.place_in(tmp_path) / "run.yaml").read_text() == "run"


SINFO = """\
#!/bin/bash
echo "$@" >>"$SEEN/sinfo"
echo '128 gpu:h100:8(S:0-1),craynetwork:4'; echo '96 gpu:h100:8(S:0-1)'; echo '64 gpu:a100:4'; echo '32 (null)'
"""


def test_cores_go_with_the_gpus_as_the_nodes_have_them(seen: Path, tmp_path: Path) -> None:
    def cores(**launch: object) -> list[str]:
        asked = request(tmp_path, **{f"launch.{name}": value for name, value in launch.items()})
        (part,) = Slurm().render(asked)
        return re.findall(r"--cpus-per-task=(\d+)", part.text)

    assert cores(gpus=8) == ["8", "8"], "no sinfo here: one core a GPU"
    put(tmp_path / "bin/sinfo", SINFO)
    assert cores(gpus=8, gpu_type="h100") == ["96", "96"], "the least of the nodes that fit"
    assert cores(gpus=2, gpu_type="H100", queue="big") == ["24", "24"]
    assert cores(gpus=4) == ["48", "48"], "half of the smaller of those with eight; the other kind has 64"
    assert cores(gpus=8, cpus=16) == ["16", "16"]
    assert cores(gpus=16) == ["16", "16"], "no node has as many: sbatch will say so"
    assert cores(gpus=0, processes=3) == ["3", "3"]
    assert "--partition=big" in (seen / "sinfo").read_text()
    asked = request(tmp_path, **{"launch.gpus": 8})
    Slurm().submit(asked)
    assert [(seen / "script-0").read_text()] == [part.text for part in Slurm().render(asked)]
    assert "--cpus-per-task=96" in (seen / "script-0").read_text()


def test_more_than_an_array_may_hold_become_several_one_after_the_other(seen: Path, tmp_path: Path) -> None:
    jobs = Slurm().submit_array([request(tmp_path, name=f"r{i}") for i in range(5)], at_once=9)
    assert [job.id for job in jobs] == ["40_0", "40_1", "41_0", "41_1", "42_0"]
    assert [(seen / f"arguments-{i}").read_text().split()[1:] for i in range(3)] == [
        [], ["--dependency=afterany:40"], ["--dependency=afterany:41"],
    ]  # fmt: skip
    assert "#SBATCH --array=0-0%1\n" in (seen / "script-2").read_text()


def test_what_stands_in_the_way_is_one_sentence(seen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="is not on this machine; launch from a login node"):
        Slurm().submit(request(tmp_path / "nowhere"))
    programs = tmp_path / "bin"
    job = Job("demo", "slurm", "7", 0.0, 1, 0, str(tmp_path), "")
    put(
        programs / "squeue", "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n"
    )
    with pytest.raises(TransientError, match="controller does not answer `squeue`"):
        Slurm().states([job])
    put(programs / "squeue", "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    put(programs / "sacct", "#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
    assert Slurm().states([job])["7"].phase == "gone"
    with pytest.raises(SetupError, match="cannot be seen from here"):
        list(Slurm().logs(job, follow=False, lines=None))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="`sbatch` is not on the PATH; go to a login node"):
        Slurm().submit(request(tmp_path))
