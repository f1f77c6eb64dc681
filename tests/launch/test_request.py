"""What is asked of a scheduler: how many processes where, what travels, what is a secret, and what cannot be."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest
from tests.train.tiny import make_run

from shoal.errors import SpecError, UsageError
from shoal.launch.bundle import Bundle
from shoal.launch.request import Request, check, processes_per_node

DATA = Path("data")


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        ({}, 1),
        ({"launch.nodes": 4}, 1),
        ({"launch.nodes": 2, "resources.processes": 8}, 4),
        ({"launch.nodes": 2, "launch.gpus": 8, "resources.device": "auto"}, 8),
        ({"launch.nodes": 2, "launch.processes": 3}, 3),
        ({"launch.nodes": 2, "fleet.islands": 4}, 2),
        ({"launch.nodes": 2, "fleet.islands": 4, "resources.processes": 2}, 4),
    ],
)
def test_processes_of_a_node(settings: dict[str, object], processes: int) -> None:
    run = make_run(DATA, **settings)
    check(run)
    assert processes_per_node(run) == processes


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"launch.nodes": 2, "launch.min_nodes": 3}, "launch.min_nodes 3 is more than launch.nodes 2"),
        ({"launch.nodes": 2, "resources.processes": 3}, "cannot be spread evenly over launch.nodes 2"),
        ({"launch.nodes": 2, "launch.processes": 2, "resources.processes": 3}, "are 4; change one"),
        ({"launch.nodes": 2, "fleet.islands": 3}, "fleet.islands 3 cannot be spread evenly"),
        ({"launch.gpus": 8}, "resources.device is cpu"),
        ({"resources.device": "cuda"}, "launch.gpus is 0"),
        ({"launch.volumes": [{"at": "/data"}]}, "needs either `claim` or `host`"),
    ],
)
def test_what_no_scheduler_could_do_is_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError, match="(?s).*".join(says.split("…"))) as refused:
        check(make_run(DATA, **settings))
    assert str(refused.value).endswith(".")


def test_a_name_becomes_a_label_that_dns_takes() -> None:
    names = {"7B.Run_v2": "run-7b-run-v2", "a" * 60: "a" * 40, "Tiny": "tiny"}
    for name, label in names.items():
        assert Request(make_run(DATA, name=name), Path(), Bundle({})).label == label


def test_secrets_are_never_in_what_can_be_read_and_a_missing_one_is_named() -> None:
    run = make_run(DATA, **{"launch.secrets": {"WANDB_API_KEY": "env:MY_KEY"}, "launch.env": {"A": "1"}})
    request = Request(run, Path(), Bundle({}))
    assert request.secret_env({"MY_KEY": "hush"})["WANDB_API_KEY"] == "hush"
    assert request.plain_env() == {"SHOAL_NODES": "1", "A": "1"}
    assert request.token not in repr(request)
    with pytest.raises(UsageError, match=r"\$MY_KEY is not set in this shell"):
        request.secret_env({})


def test_the_same_files_make_the_same_bundle_wherever_and_whenever_they_were_written(tmp_path: Path) -> None:
    made = []
    for place in ("a", "b"):
        folder = tmp_path / place
        (folder / "sub").mkdir(parents=True)
        (folder / "train.py").write_text("print(1)\n")
        (folder / "sub" / "x.txt").write_text("x")
        (folder / ".env").write_text("SECRET=1")
        made.append(Bundle.of("name: a\n", folder))
    assert made[0].sha256 == made[1].sha256
    assert made[0].tar() == made[1].tar()
    assert set(made[0].files) == {"run.yaml", "code/train.py", "code/sub/x.txt"}
    (tmp_path / "b" / "train.py").chmod(0o755)
    assert Bundle.of("name: a\n", tmp_path / "b").sha256 != made[0].sha256


def test_a_bundle_takes_what_git_would_and_is_unpacked_once(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    subprocess.run(["git", "init", "-q", str(code)], check=True)
    (code / ".gitignore").write_text("big.bin\n")
    (code / "big.bin").write_bytes(b"0" * 100)
    (code / "run.sh").write_text("echo\n")
    (code / "run.sh").chmod(0o755)
    bundle = Bundle.of("name: a\n", code)
    assert set(bundle.files) == {"run.yaml", "code/.gitignore", "code/run.sh"}
    there = bundle.unpack_into(tmp_path)
    assert (there / "code" / "run.sh").stat().st_mode & 0o111
    (there / "code" / "run.sh").write_text("mark")
    assert bundle.unpack_into(tmp_path) == there
    assert (there / "code" / "run.sh").read_text() == "mark", "what is there is not written again"


def test_a_folder_of_data_is_refused_as_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.launch.bundle.MOST_BYTES", 10)
    (tmp_path / "data.bin").write_bytes(b"0" * 11)
    with pytest.raises(UsageError, match="code travels, data does not"):
        Bundle.of("name: a\n", tmp_path)
    with pytest.raises(UsageError, match="is not a folder"):
        Bundle.of("name: a\n", tmp_path / "nowhere")


def hostile(*entries: tuple[str, bytes, dict[str, str], bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        for name, data, headers, kind in entries:
            entry = tarfile.TarInfo(name)
            entry.size, entry.pax_headers, entry.type = len(data), headers, kind
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def test_what_is_no_bundle_of_plain_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tarfile.REGTYPE
    for name, data, headers, kind in [
        ("a", b"x", {"size": "-1024"}, plain),
        ("a", b"x", {"GNU.sparse.size": "-9000", "GNU.sparse.map": "0,0"}, plain),
        ("a", b"x", {"path": "a\0b"}, plain),
        ("../a", b"x", {}, plain),
        ("/a", b"x", {}, plain),
        ("a", b"", {}, tarfile.SYMTYPE),
    ]:
        with pytest.raises(tarfile.TarError, match=r"it holds something else|it names a file outside"):
            Bundle.of_tar(hostile((name, data, headers, kind)))
    taken = Bundle.of_tar(hostile(("a", b"x", {}, plain)))
    assert taken.files == {"a": b"x"}
    assert Bundle.of_tar(taken.tar()) == taken
    with pytest.raises(tarfile.TarError, match="cut off"):
        Bundle.of_tar(taken.tar()[:-4])
    monkeypatch.setattr("shoal.launch.bundle.MOST_BYTES", 4096)
    with pytest.raises(tarfile.TarError, match="it holds too much"):
        Bundle.of_tar(hostile(("a", bytes(100_000), {}, plain)))
