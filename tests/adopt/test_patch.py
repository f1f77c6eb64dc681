"""A mend compiles, and the finding that it is for is gone; what is not plain is left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.adopt.doctor import examine
from shoal.adopt.patch import patch, write
from shoal.cli.main import main
from shoal.errors import UsageError
from tests.adopt.corpus import DEFECTS, Defect, copy_of

MENDED = ("no-seed", "sampler-epoch", "non-atomic-save", "unsafe-load", "zero-grad", "checkpoint-rng")
PLAIN = [
    d
    for d in DEFECTS
    if (d.rule in MENDED and d.script not in ("snapshot_class.py", "pieces.py", "project/train.py"))
    or (d.script, d.rule) in (("imagenet_spawn.py", "no-seed"), ("vision_amp.py", "checkpoint-scaler"))
    or (d.script, d.rule) == ("project/train.py", "no-seed")
]


@pytest.mark.parametrize("defect", PLAIN, ids=lambda d: f"{d.script}:{d.rule}")
def test_a_mended_script_compiles_and_the_finding_is_gone(defect: Defect, tmp_path: Path) -> None:
    script = defect.put_into(tmp_path)
    before = examine(script)
    made = patch(before)
    assert defect.rule in {finding.rule for finding in made.mended}
    write(made)
    for file in tmp_path.rglob("*.py"):
        compile(file.read_bytes(), str(file), "exec")
    after = {finding.rule for finding in examine(script).findings}
    assert defect.rule not in after
    assert after < {finding.rule for finding in before.findings}


def test_the_diff_is_one_that_patch_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = copy_of("diffusion.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["adopt", "--patch", "mend.diff", "diffusion.py"]) == 2
    diff = Path("mend.diff").read_text()
    wanted = patch(examine(script)).after.script.source
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "apply", "mend.diff"], check=True)
    assert script.read_text() == wanted
    assert diff.startswith("--- a/diffusion.py\n+++ b/diffusion.py\n")


def test_nothing_is_changed_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = copy_of("vision_amp.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    before = script.read_bytes()
    assert main(["adopt", "vision_amp.py"]) == 2
    assert main(["adopt", "--patch", "x.diff", "vision_amp.py"]) == 2
    assert script.read_bytes() == before
    script.chmod(0o754)
    assert main(["adopt", "--apply", "vision_amp.py"]) == 2
    assert script.read_bytes() != before
    assert script.stat().st_mode & 0o777 == 0o754
    assert main(["adopt", "vision_amp.py"]) == 0  # a hint is left, and no defect


def test_a_script_that_its_owner_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    script = copy_of("vision_amp.py", tmp_path)
    made = patch(examine(script))
    assert made.mended
    script.write_text(mine := script.read_text() + "# mine\n")
    with pytest.raises(UsageError, match="has changed since it was read; nothing is changed"):
        write(made)
    assert script.read_text() == mine


def test_a_diff_is_written_over_no_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = copy_of("vision_amp.py", tmp_path)
    before, diff = script.read_bytes(), tmp_path / "mend.diff"
    assert main(["adopt", "--patch", str(script), str(script)]) == 2
    assert "is there and is no diff; give another name" in capsys.readouterr().err
    assert script.read_bytes() == before
    for _ in range(2):  # the second over the first
        assert main(["adopt", "--patch", str(diff), str(script)]) == 2
        assert diff.read_text().startswith("--- a/")
    (tmp_path / "run.yaml").write_text("--- # mine\nname: x\n")
    assert main(["adopt", "--patch", str(tmp_path / "run.yaml"), str(script)]) == 2
    assert (tmp_path / "run.yaml").read_text() == "--- # mine\nname: x\n"
    assert main(["adopt", "--patch", str(tmp_path), str(script)]) == 2
    assert main(["adopt", "--patch", str(tmp_path / "no" / "mend.diff"), str(script)]) == 2


TRAINS = """\
import torch{also}
torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(2, 2)).sum().backward()
    optimizer.step()
    {save}
"""


def mended(tmp_path: Path, save: str, also: str = "", newline: str = "\n") -> str | None:
    script = tmp_path / "train.py"
    script.write_bytes(TRAINS.format(save=save, also=also).replace("\n", newline).encode())
    made = patch(examine(script))
    return made.after.script.source if made.mended else None


@pytest.mark.slow  # it imports torch
def test_a_mended_save_runs(tmp_path: Path) -> None:
    """In a file with bytes beyond ASCII, line ends of Windows and no last one."""
    save = "name = 'größe'; torch.save(model.state_dict(), 'größe.pt')"
    assert mended(tmp_path, save) is None  # not alone on its line
    source = mended(tmp_path, "torch.save({'größe': 1}, 'größe' + '.pt')  # ü", newline="\r\n")
    assert source is not None
    assert "\n" not in source.replace("\r\n", "")
    (tmp_path / "train.py").write_bytes(source.encode())
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["größe.pt", "train.py"]


@pytest.mark.parametrize(
    "save",
    [
        "if step: torch.save(model, 'a.pt')",
        "done = torch.save(model, 'a.pt')",
        "torch.save(model, open('a.pt', 'wb'))",
        "os = 3; torch.save(model, 'a.pt')",
    ],
)
def test_what_is_not_plain_is_left_alone(save: str, tmp_path: Path) -> None:
    assert mended(tmp_path, save) is None


def test_a_file_that_a_safe_load_would_refuse_keeps_its_load(tmp_path: Path) -> None:
    """pieces.py keeps NumPy's random state, which is no tensor."""
    assert "unsafe-load" not in {f.rule for f in patch(examine(copy_of("pieces.py", tmp_path))).mended}
