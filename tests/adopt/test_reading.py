"""What the doctor is given: files of all kinds, names in all ways. Nothing of it is ever run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shoal.adopt.doctor import examine
from shoal.adopt.project import MOST_BYTES, read_project
from shoal.cli.main import main
from shoal.errors import SpecError

LOOP = """
model = {model}
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(2, 2)).sum()
    loss.backward()
    optimizer.step()
"""


def rules(tmp_path: Path, text: str, **others: str) -> set[str]:
    for name, content in others.items():
        (tmp_path / f"{name}.py").write_text(content)
    (tmp_path / "train.py").write_text(text)
    return {finding.rule for finding in examine(tmp_path / "train.py").findings}


PLAIN = "import torch\n" + LOOP.format(model="torch.nn.Linear(2, 2)")


@pytest.mark.parametrize(
    ("text", "seeded"),
    [
        (PLAIN, False),
        ("import torch\ntorch.manual_seed(3)\n" + PLAIN, True),
        ("import torch as t, torch\nt.random.manual_seed(3)\n" + PLAIN, True),
        ("from torch import manual_seed as fix\nfix(3)\n" + PLAIN, True),
        ("import torch, time\ntorch.manual_seed(int(time.time()))\n" + PLAIN, False),
        ("import random\nrandom.seed(3)\n" + PLAIN, False),
        ("from helper import fix\nfix(3)\n" + PLAIN, True),
        ("from helper import fix\n" + PLAIN, False),
        ("from elsewhere import seed_everything\nseed_everything(3)\n" + PLAIN, True),
    ],
)
def test_a_seed_is_found_wherever_it_is_set(text: str, seeded: bool, tmp_path: Path) -> None:
    helper = "import torch as anything\ndef fix(n):\n    anything.manual_seed(n)\n"
    assert ("no-seed" not in rules(tmp_path, text, helper=helper)) == seeded


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("if dist.get_rank() == 0:\n    dist.barrier()", True),
        ("if rank != 0:\n    dist.barrier()\nif rank == 0:\n    dist.barrier()", False),
        ("if rank == 0:\n    dist.broadcast(x, 0)\nelse:\n    dist.broadcast(x, 0)", False),
        ("def everywhere():\n    dist.all_reduce(x)\nif not rank:\n    everywhere()", True),
        ("def leave():\n    if rank != 0:\n        return\n    dist.barrier()\nleave()", True),
        ("if world > 1:\n    dist.barrier()", False),
        ("if rank == 0:\n    dist.barrier(group=mine)", False),
        ("main = rank == 0\nif main and True:\n    dist.all_gather_object(x, 1)", True),
    ],
)
def test_a_collective_on_some_ranks_is_wrong_unless_the_others_make_it_too(
    body: str, wrong: bool, tmp_path: Path
) -> None:
    begin = "import torch.distributed as dist\nrank, world, mine, x = dist.get_rank(), 2, None, []\n"
    assert ("one-rank-collective" in rules(tmp_path, begin + body + "\n" + PLAIN)) == wrong


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("print(loss.item())", True),
        ("if step % 10 == 0:\n        print(loss.item())", False),
        ("if rank == 0:\n        print(loss.item())", True),
        ("if rank == 0 and step % 10 == 0:\n        print(loss.item())", False),
        ("if step % 10:\n        continue\n    print(f'{loss}')", False),
        ("print(f'{loss:.3f}')", True),
        ("log(loss)", False),
    ],
)
def test_a_value_that_is_read_now_and_then_is_no_sync_on_every_step(line: str, wrong: bool, tmp_path: Path) -> None:
    text = PLAIN.replace("torch.nn.Linear(2, 2)", "torch.nn.Linear(2, 2).cuda()") + f"    {line}\n"
    assert ("host-sync" in rules(tmp_path, "rank = 0\n" + text)) == wrong


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("import horovod.torch as hvd\nhvd.init()\n", "Horovod had its last release in June 2023"),
        ("from colossalai.booster import Booster\nb = Booster()\n", "Colossal-AI had its last release in June 2025"),
        ("import composer\ncomposer.Trainer()\n", "Composer had its last release in July 2025"),
        ("from .horovod import init\ninit()\n", None),
        ("import torch\nhorovod = torch\nhorovod.manual_seed(1)\n", None),
        ("import composer\ncomposer.run()\n", None),
    ],
)
def test_a_framework_that_nobody_cares_for_is_named_with_what_to_do(
    first: str, said: str | None, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(first + PLAIN)
    found = [finding for finding in examine(tmp_path / "train.py").findings if finding.rule == "dormant"]
    if said is None:
        assert not found
    else:
        assert (found[0].reason.startswith(said), found[0].line, len(found)) == (True, 1, 1)


def test_for_a_boost_of_colossal_the_lines_of_pytorch_are_proposed_by_the_names_of_the_script(tmp_path: Path) -> None:
    first = "from colossalai.booster import Booster\nbooster = Booster()\n"
    boost = "net, opt, *_ = booster.boost(net, opt)\nfor step"
    text = first + PLAIN.replace("model", "net").replace("optimizer", "opt").replace("for step", boost)
    (tmp_path / "train.py").write_text(text)
    (found,) = (finding for finding in examine(tmp_path / "train.py").findings if finding.rule == "dormant")
    line = text.splitlines().index("net, opt, *_ = booster.boost(net, opt)") + 1
    for said in (f"line {line} of ", "`fully_shard(net)`", "before opt is made", "shoal checkpoint import"):
        assert said in found.reason


def test_an_optimizer_that_horovod_has_wrapped_is_one(tmp_path: Path) -> None:
    text = PLAIN.replace("optimizer.zero", "o.zero").replace("optimizer.step()", "o.step()")
    text = text.replace("for step", "o = hvd.DistributedOptimizer(optimizer)\nfor step")
    text = "import horovod.torch as hvd\n" + text
    assert "zero-grad" not in rules(tmp_path, text)
    assert "zero-grad" in rules(tmp_path, text.replace("    o.zero_grad()\n", ""))


def test_nothing_of_it_is_run(tmp_path: Path) -> None:
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    rules(tmp_path, trap + "import helper\n" + PLAIN, helper=trap)
    assert not (tmp_path / "ran").exists()


def test_imports_that_lead_out_of_the_project_are_not_followed(tmp_path: Path) -> None:
    outside, project = tmp_path / "outside.py", tmp_path / "project"
    (project / "loop").mkdir(parents=True)
    outside.write_text("x = 1\n")
    (project / "linked.py").symlink_to(outside)
    (project / "round.py").symlink_to(project / "round.py")
    (project / "loop" / "loop").symlink_to(project / "loop")
    (project / "train.py").write_text("import linked, round, loop.loop.loop\nfrom .. import outside\nimport helper\n")
    (project / "helper.py").write_text("import train, helper\n")
    assert [m.path.name for m in read_project(project / "train.py").modules.values()] == ["train.py", "helper.py"]


def test_a_module_that_cannot_be_read_is_said_and_the_rest_is_judged(tmp_path: Path) -> None:
    (tmp_path / "huge.py").write_bytes(b"#" * (MOST_BYTES + 1))
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "train.py").write_text("import huge, broken, latin, pickle\npickle.load(open('x', 'rb'))\n")
    report = examine(tmp_path / "train.py")
    assert [finding.rule for finding in report.findings] == ["unsafe-load"]
    assert sum("is not read" in note for note in report.notes) == 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: None, "there is no file"),
        (lambda p: p.mkdir(), "is a folder"),
        (lambda p: p.write_text("def f(:\n"), "is no Python"),
        (lambda p: p.write_bytes(b"x = '\xff'\n"), "is no Python"),
        (lambda p: os.truncate(p, 100 << 20) if not p.touch() else None, "has 104,857,600 bytes"),
        (lambda p: p.write_text("x = " + "(" * 500 + ")" * 500), "is no Python"),
        (lambda p: p.write_text("x = " + "-" * 3000 + "1"), "deep"),
        (lambda p: p.symlink_to(p), "is a link that leads nowhere"),
        (lambda p: os.mkfifo(p), "is a FIFO"),
    ],
)
def test_bad_input_gets_one_sentence(
    make: object, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "train.py")  # type: ignore[operator]
    assert main(["adopt", str(tmp_path / "train.py")]) in (2, 0)
    said = capsys.readouterr().err
    if words == "deep":  # Python 3.11 reads it, later ones do not
        return
    assert words in said
    assert said.count("\n") == 1


def test_no_hostile_text_takes_long(tmp_path: Path) -> None:
    """Names that lead to each other, each in many ways."""
    names = [f"a{i}" for i in range(60)]
    text = "import torch\n" + "".join(
        f"def {a}(x):\n" + "".join(f"    x = {b}(x) or {b}(x)\n" for b in names[:12]) + "    return x\n" for a in names
    )
    text += f"optimizer = {names[0]}(1)\nfor i in range(2):\n    optimizer.step()\ntorch.save({names[1]}(2), 'x.pt')\n"
    (tmp_path / "train.py").write_text(text)
    examine(tmp_path / "train.py")  # it ends


def test_words_for_the_script_need_a_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    assert main(["adopt", str(tmp_path / "train.py"), "--lr", "1"]) == 2
    assert "is run with --measure only" in capsys.readouterr().err


def test_the_report_is_json_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    assert main(["adopt", "--json", str(tmp_path / "train.py")]) == 2
    said = json.loads(capsys.readouterr().out)
    (finding,) = said["findings"]
    assert (finding["rule"], finding["line"], finding["confidence"]) == ("no-seed", 4, "unconfirmed")
    assert said["measured"] is None


def test_a_script_that_is_nothing_is_refused_in_words() -> None:
    with pytest.raises(SpecError, match="there is no file"):
        examine(Path("/nowhere/train.py"))
