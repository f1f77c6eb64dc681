"""The table of wrong inputs: what a person types, the one sentence that comes back, and the exit code.

Each row runs the real command line. `pytest tests/test_wrong_inputs.py -s` prints the table.
"""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.journal import journal
from tests.patience import limit, until
from tests.require import unavailable
from tests.train.tiny import make_data
from tests.warm import Executed

pytestmark = pytest.mark.usefixtures("warm_starts")
GOOD = """\
name: demo
model: {dim: 32, layers: 1, heads: 2}
data: {train: data, seq_len: 16}
train: {steps: 5, batch: 4}
resources: {processes: 1, threads: 1, device: cpu}
track: {mlflow: false}
guard: {backoff_s: 0.01}
"""


@dataclass(frozen=True)
class Row:
    """What is wrong; the command; the exit code; what the sentence must say; what to do to the folder first."""

    what: str
    command: str
    code: int
    says: str
    before: Callable[[Path], object] = lambda folder: None


def yaml(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "run.yaml").write_text(GOOD.replace(old, new))


def text(name: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def flip_a_bit(folder: Path) -> None:
    path = folder / "data" / "shard-00000.tokens"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def truncated_gzip(folder: Path) -> None:
    rows = "\n".join(json.dumps({"text": f"row {i} " * 50}) for i in range(500))
    (folder / "in.jsonl.gz").write_bytes(gzip.compress(rows.encode())[:-20])


def a_run_with_another_seed(folder: Path) -> None:
    assert main(["train", "run.yaml", "train.steps=1"]) == 0


def a_running_run(folder: Path) -> None:
    """Holds the run's lock, as its supervisor would."""
    code = """
import time; from pathlib import Path; from shoal.journal import lock; from shoal.journal.rundir import RunDir
with lock.hold(RunDir(Path("runs/demo"))):
    Path("runs/demo/journal.jsonl").touch()
    print("held", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    request_end.append(process)


NO_MODEL = yaml("model: {dim: 32, layers: 1, heads: 2}\n", "")
request_end: list[subprocess.Popen[bytes]] = []

SPEC = [
    Row("no such run file", "train missing.yaml", 2, "no run file missing.yaml.*shoal init"),
    Row("an empty run file", "train run.yaml", 2, "run.yaml is empty", text("run.yaml", "")),
    Row("a misspelt key", "train run.yaml", 2, r"run.yaml:4:9.*train.stpes.*did you mean", yaml("steps", "stpes")),
    Row("a key in the wrong section", "train run.yaml", 2, "lr belongs under", yaml("seq_len", "lr: 1, seq_len")),
    Row("a misspelt override", "train run.yaml train.step=5", 2, "train.step.*did you mean train.steps"),
    Row("a word where a number belongs", "train run.yaml train.steps=many", 2, "train.steps.*many"),
    Row("a negative number", "train run.yaml train.batch=-3", 2, "train.batch.*-3"),
    Row("broken YAML", "show run.yaml", 2, "run.yaml:.*not YAML", yaml("batch: 4}", "batch: 4")),
    Row("a tab", "show run.yaml", 2, "tab", text("run.yaml", "train:\n\tsteps: 3\n")),
    Row("an unknown preset", "show run.yaml model.preset=llama3-9b", 2, "llama3-9b.*did you mean"),
    Row("heads that do not divide", "train run.yaml model.heads=5", 2, "model.*heads.*5"),
    Row("a mesh that does not fit", "train run.yaml mesh.dp_shard=3", 2, "processes"),
    Row("a batch nobody can share", "train run.yaml resources.processes=3", 2, "train.batch.* 4.*(3|6)"),
    Row("evaluation without data", "train run.yaml eval.every=2", 2, "data.eval"),
    Row(
        "experts that no class holds",
        "train run.yaml model.preset=mixtral-8x7b model.experts.shared=1",
        2,
        "mixtral has no model.experts.shared",
        NO_MODEL,
    ),
    Row("an unknown verb", "trian run.yaml", 2, "did you mean `shoal train`"),
    Row("an unknown option", "train run.yaml --fast", 2, "--fast"),
    Row("an unknown run", "report demmo", 2, "demmo", a_run_with_another_seed),
    Row("another spec under the same name", "train run.yaml seed=7", 2, "seed was 0, now 7", a_run_with_another_seed),
    Row("history changed on resume", "resume demo data.seq_len=8", 2, "data.seq_len", a_run_with_another_seed),
    Row("a run that is already running", "train run.yaml", 2, "already running as pid", a_running_run),
]
DATA = [
    Row("data that was not prepared", "train run.yaml data.train=nowhere", 78, "nowhere.*shoal data prepare"),
    Row("text longer than the windows there are", "train run.yaml data.seq_len=4000", 78, "lower data.seq_len"),
    Row("a flipped bit", "data info data --verify", 78, "shard-00000.tokens", flip_a_bit),
    Row("invalid UTF-8", "data prepare in.txt --out out", 78, "in.txt.*UTF-8", text("in.txt", b"ab\ncd\xff\xfe")),
    Row("an empty file", "data prepare in.txt --out out", 78, "in.txt.*empty", text("in.txt", "")),
    Row("a truncated gzip", "data prepare in.jsonl.gz --out out", 78, "in.jsonl.gz.*truncated", truncated_gzip),
    Row(
        "a missing field",
        "data prepare in.jsonl --out out",
        78,
        "in.jsonl:2.*text",
        text("in.jsonl", '{"text":"a"}\n{"body":"b"}\n'),
    ),
    Row("broken JSON", "data prepare in.jsonl --out out", 78, "in.jsonl:1.*JSON", text("in.jsonl", '{"text": \n')),
    Row("no such input", "data prepare nothing.txt --out out", 78, "nothing.txt"),
    Row(
        "a broken tokenizer",
        "data prepare in.txt --tokenizer t.json --out out",
        78,
        "t.json",
        lambda f: (text("in.txt", "some text")(f), text("t.json", "{")(f)),
    ),
    Row(
        "an output folder with something else in it",
        "data prepare in.txt --out run-folder",
        78,
        "run-folder",
        lambda f: (text("in.txt", "some text")(f), (f / "run-folder").mkdir(), text("run-folder/x", "precious")(f)),
    ),
]
ENVIRONMENT = [
    Row("no GPU", "train run.yaml resources.device=cuda", 78, "no GPU is visible"),
    Row("weights that are not there", "train run.yaml model.weights=nowhere", 78, "nowhere", NO_MODEL),
    Row(
        "weights in pickle",
        "train run.yaml model.weights=hf",
        78,
        r"safetensors",
        lambda f: (NO_MODEL(f), _pickled_weights(f)),
    ),
    Row(
        "a workspace that cannot be written",
        "train run.yaml --workspace blocked",
        78,
        "cannot write the run directory",
        text("blocked", "a file where a folder should be"),
    ),
    Row("no checkpoint to sample from", "sample nobody --prompt x", 2, "nobody"),
    Row("a scheduler there is none of", "launch run.yaml --on moon", 2, "moon.*--on"),
    Row("more processes than fit the nodes", "launch run.yaml launch.nodes=2", 2, "cannot be spread evenly"),
    Row(
        "a secret that is not set",
        'launch run.yaml launch.secrets={"A":"env:NOT_SET"}',
        2,
        "is not set in this shell",
    ),
    Row("a job of a run there is none of", "stop nobody", 2, "nobody"),
    Row("a sweep over nothing", "sweep run.yaml", 2, "say what to vary"),
    Row("a sweep over a wrong name", "sweep run.yaml --grid train.lr=1,2", 2, "lr belongs under train.optimizer"),
    Row(
        "a range the wrong way round", "sweep run.yaml --random 2 --range train.optimizer.lr=2..1", 2, "the lower first"
    ),
]


def _pickled_weights(folder: Path) -> None:
    (folder / "hf").mkdir()
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"intermediate_size": 64, "vocab_size": 320, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    (folder / "hf" / "pytorch_model.bin").write_bytes(b"\x80\x02")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOAL_WORKSPACE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    make_data(tmp_path / "data", documents=40)
    (tmp_path / "run.yaml").write_text(GOOD)
    return tmp_path


@pytest.mark.parametrize("row", [*SPEC, *DATA, *ENVIRONMENT], ids=lambda row: row.what)
def test_wrong_input_gets_one_sentence_and_its_exit_code(
    row: Row, folder: Path, capfd: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    row.before(folder)
    capfd.readouterr()
    try:
        code = main(row.command.split())
    finally:
        while request_end:
            request_end.pop().kill()
    err = capfd.readouterr().err
    said = [line for line in err.splitlines() if line.startswith("shoal: ")]
    if pytestconfig.getoption("capture") == "no":
        with capfd.disabled():
            print(f"\n| {row.what} | `shoal {row.command}` | {code} | {' / '.join(said)} |", end="")
    assert code == row.code, err
    assert len(said) == 1, err
    assert "Traceback" not in err
    assert re.search(row.says, said[0]), said[0]
    assert said[0].rstrip().endswith((".", "?", "`")), said[0]


def test_a_hub_that_cannot_be_reached_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when the hub's client is imported, so in a process of its own
    monkeypatch.setattr("subprocess.Popen", Executed)
    process = start(folder, "data prepare hf:nobody/nothing --out out")
    out, _ = process.communicate(timeout=limit(120))
    assert process.returncode == 78, out
    assert re.match(r"shoal: the Hugging Face hub cannot be reached to read nobody/nothing .*\.$", out)


def start(folder: Path, command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shoal", *command.split()],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(folder: Path, step: int) -> None:
    path = folder / "runs" / "demo" / "journal.jsonl"
    until(lambda: path.exists() and any(r["kind"] == "step" and r["step"] >= step for r in journal.records(path)), 120)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_saves_and_leaves_with_143(number: signal.Signals, folder: Path) -> None:
    process = start(folder, "train run.yaml train.steps=100000 resources.processes=2")
    wait_for_step(folder, 3)
    process.send_signal(number)
    out, _ = process.communicate(timeout=limit(60))
    assert process.returncode == 143, out
    assert re.search(rf"told to stop \({number.name}\); saved at step \d+", out)
    assert list((folder / "runs/demo/checkpoints").glob("step-*/manifest.json"))


def test_a_tracking_server_that_is_not_there_stops_nothing(folder: Path) -> None:
    """The port of nobody: training goes on, says so once, and keeps the data for later."""
    process = start(folder, "train run.yaml track.mlflow=http://127.0.0.1:9 train.steps=20")
    out, _ = process.communicate(timeout=limit(200))
    assert process.returncode == 0, out
    said = len(re.findall(r"127\.0\.0\.1:9", out))
    assert said == 1 or (said == 0 and "tracking is behind" in out), out  # on a busy machine the run may end first
    assert "shoal track sync demo" in out


def test_a_full_disk_is_named_and_loses_nothing(folder: Path) -> None:
    """A real file system of 3 MB: the first checkpoints fit, a later one does not; the older ones stay good."""
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.call(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]):
        unavailable("mount", "this system does not let us mount a tiny disk")
    try:
        command = "train run.yaml --workspace disk model.dim=64 model.layers=2 train.steps=40 guard.restarts=0"
        process = start(folder, f"{command} checkpoint.every=10 checkpoint.keep=50")
        out, _ = process.communicate(timeout=limit(200))
        assert process.returncode in (75, 78), out
        assert "No space left on device" in out
        assert main(["checkpoint", "verify", "demo", "--workspace", "disk"]) == 0
    finally:
        subprocess.call(["umount", str(disk)])
