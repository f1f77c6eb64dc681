"""All tests that want a GPU, in one command: `make test-gpu`, or

    python -m tests.gpu.suite [--only matrix,drills] [--out FOLDER] [--minutes 15] [--device cpu] [--list]

One card is enough: ranks share it (shoal.shared_gpu), under MPS where that is there. Of several GPUs all are used.
Each part is pytest in a process of its own, with a time of its own; one that hangs is ended and the others go on.
Results are printed as they come; FOLDER gets table.txt, suite.json and what each part printed. What it finds is what is
right; times mean something in the part `speed` alone, which has nothing beside it. With `--device cpu` the ranks talk
over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal.near import closest
from shoal.shared_gpu import SETTING
from tests.gpu import told
from tests.gpu.mps import mps
from tests.gpu.table import Row, summary, table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LOOK_S = 0.2
GRACE_S = 20.0  # for a part that is told to stop, to put away what it has started


@dataclass(frozen=True)
class Part:
    name: str
    what: str
    files: tuple[str, ...]
    limit_s: float
    mps: bool = False
    beside: bool = False  # its files beside each other, each in a process of its own
    speed: bool = False  # its times mean something: nothing runs beside it
    on_cpu: bool = True  # it can be tried over gloo


PARTS = (
    Part("matrix", "every mesh in float32, Muon too", ("test_nccl.py",), 240, mps=True),
    Part("precision", "bf16 compiled, fp8, recomputation", ("test_nccl_precision.py",), 200, mps=True),
    Part("paths", "evaluation, resume elsewhere, torchrun, profile, bench", ("test_nccl_paths.py",), 120, mps=True),
    Part("compiles", "compiled once; packed pairs; fp8 that is evaluated", ("test_nccl_compiles.py",), 150, mps=True),
    Part("classes", "classes of transformers by their own plan; a check of a run", ("test_nccl_hf.py",), 240, mps=True),
    Part("drills", "every drill, and islands", ("test_nccl_drills.py",), 300),
    Part("drills-mps", "the same under MPS", ("test_nccl_drills.py",), 300, mps=True),
    Part(
        "one",
        "what one GPU computes",
        ("test_cuda.py", "test_fast_cuda.py", "test_recompute_cuda.py", "test_ring_cuda.py"),
        240,
        beside=True,
        on_cpu=False,
    ),
    Part("speed", "what is timed on one GPU, and all other tests", (), 240, speed=True, on_cpu=False),
)


@dataclass
class Told:
    """What a part has come to."""

    name: str
    what: str
    mps: str  # "yes", "no", or why not
    speed: bool
    limit_s: float
    s: float = 0.0
    rows: list[Row] = field(default_factory=list)


def files_of(part: Part, parts: Sequence[Part] = PARTS, folder: Path = HERE) -> list[str]:
    """A file that no part names belongs to the last one: none is forgotten."""
    if part.files:
        return [str(folder / name) for name in part.files]
    named = {name for other in parts for name in other.files}
    return [str(file) for file in sorted(folder.glob("test_*.py")) if file.name not in named]


def chosen(only: str, parts: Sequence[Part] = PARTS) -> list[Part]:
    names = [part.name for part in parts]
    wanted = [name.strip() for name in only.split(",") if name.strip()] or names
    for name in wanted:
        if name not in names:
            near = closest(name, names)
            raise SystemExit(f"there is no part '{name}': " + (f"did you mean {near}?" if near else ", ".join(names)))
    return [part for part in parts if part.name in wanted]


def run_part(part: Part, device: str, limit_s: float, logs: Path, say: Callable[[Row], None]) -> Told:
    """All of its tests, whatever becomes of them."""
    logs.mkdir(parents=True, exist_ok=True)
    with mps() if part.mps and device == "cuda" else contextlib.nullcontext() as daemon:
        how = ("yes" if daemon.env else daemon.why_not) if daemon else "no"
        result = Told(part.name, part.what, how, part.speed, limit_s)
        began = time.monotonic()
        env = {
            **os.environ,
            **(daemon.env if daemon else {}),
            SETTING: "1",
            "SHOAL_TEST_DEVICE": device,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        files = files_of(part)
        groups = [[file] for file in files] if part.beside else [files]
        runs = [_Pytest(part.name, files, logs / f"{part.name}-{i}", env, say) for i, files in enumerate(groups)]
        try:
            while sum(run.look() for run in runs) and time.monotonic() - began < limit_s:
                time.sleep(LOOK_S)
        finally:
            for run in runs:
                result.rows += run.close(limit_s)
        result.s = round(time.monotonic() - began, 1)
    return result


class _Pytest:
    """One process of pytest, what it has told so far, and its end."""

    def __init__(
        self, part: str, files: Sequence[str], place: Path, env: dict[str, str], say: Callable[[Row], None]
    ) -> None:
        self._part, self._say = part, say
        self._told, self._log = place.with_suffix(".jsonl"), place.with_suffix(".log")
        self._told.write_text("")  # the folder may have seen another
        self._rows: list[Row] = []
        self._tests: list[str] = []
        self._in = ""
        self._read = 0
        command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.told", "-v", "-s", "--tb=short", *files]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**env, told.FILE: str(self._told)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def look(self) -> bool:
        """Whether it runs; what is new is said."""
        runs = self._process.poll() is None
        with open(self._told) as file:
            file.seek(self._read)
            while (line := file.readline()).endswith("\n"):
                self._read = file.tell()
                self._heard(json.loads(line))
        return runs

    def close(self, limit_s: float) -> list[Row]:
        """Ends it if it runs, with all that it has started; tests that were not done are rows too."""
        late = self._process.poll() is None
        if late:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        self.look()
        end_session(self._process.pid)
        code = self._process.wait()
        self._say_unreached(code, f"the part was ended after {limit_s:.0f} s" if late else "")
        return self._rows

    def _heard(self, said: dict) -> None:
        if said["kind"] == "collected":
            self._tests = said["tests"]
        elif said["kind"] == "begin":
            self._in = said["test"]
        else:
            self._in = ""
            self._row(said["test"], said["outcome"], said["s"], said["told"], said["words"])

    def _row(self, test: str, outcome: str, s: float, told: str, words: str) -> None:
        row = Row(self._part, test.rpartition("/")[2], outcome, s, told, words)
        self._rows.append(row)
        self._say(row)

    def _say_unreached(self, code: int, late: str) -> None:
        done = {row.test for row in self._rows}
        left = [test for test in self._tests if test.rpartition("/")[2] not in done]
        if code in (0, 1) and not left and self._tests:
            return
        why = late or f"pytest ended with {code}: {_last_line(self._log)}"
        for test in left:
            self._row(
                test, "failed", 0.0, "", f"it was in it when {why}" if test == self._in else f"not reached: {why}"
            )
        if not self._tests and not self._rows:
            self._row(self._log.stem, "failed", 0.0, "", f"no test was found: {why}")


def end_session(leader: int) -> None:
    """All processes of a session, however deep: by the session that each says it belongs to."""
    for _ in range(3):  # one may start another meanwhile
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = stat.read_text().rpartition(") ")[2].split()
                if int(fields[3]) == leader:
                    os.kill(int(stat.parent.name), signal.SIGKILL)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E  ", "ERROR"))]
    return (errors or lines or ["it said nothing"])[-1].strip()


def machine(device: str) -> str:
    """In words; asked in a process of its own, as this one is not to hold the device."""
    code = (
        "import torch; n = torch.cuda.device_count(); v = torch.cuda.nccl.version() if n else (); "
        "print(f'{n} x {torch.cuda.get_device_name(0)}' if n else 'no GPU', 'torch', torch.__version__, "
        "'NCCL', '.'.join(map(str, v)) or '-', sep=', ')"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    return f"{said}, {len(os.sched_getaffinity(0))} cores, {platform.machine()}, on {device}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PART,…", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--out", type=Path, help="a folder for the table, the JSON and the logs (default: a new one)")
    parser.add_argument("--minutes", type=float, default=15.0, help="for all of it (15)")
    parser.add_argument("--patience", type=float, default=1.0, help="each part may take so many times as long (1)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--list", action="store_true", help="say what the parts are")
    args = parser.parse_args(argv)
    parts = chosen(args.only)
    if args.list:
        for part in parts:
            print(f"{part.name:<11} at most {part.limit_s:3.0f} s  {part.what}")
        return 0
    if args.device == "cpu":
        parts = [part for part in parts if part.on_cpu]
    out = args.out or Path(tempfile.mkdtemp(prefix="shoal-gpu-"))
    out.mkdir(parents=True, exist_ok=True)
    print(where := machine(args.device), flush=True)
    began, done = time.monotonic(), list[Told]()
    for part in parts:
        limit_s = min(args.patience * part.limit_s, 60 * args.minutes - (time.monotonic() - began))
        if limit_s <= 0:
            row = Row(part.name, part.what, "failed", 0.0, "", f"not begun: {args.minutes:g} minutes were over")
            done.append(Told(part.name, part.what, "no", part.speed, 0.0, rows=[row]))
        else:
            print(f"--- {part.name}: {part.what}", flush=True)
            done.append(run_part(part, args.device, limit_s, out / "logs", lambda row: print(row.line(), flush=True)))
        seconds = time.monotonic() - began
        told_all = {"machine": where, "s": round(seconds, 1), "parts": [asdict(part) for part in done]}
        (out / "suite.json").write_text(json.dumps(told_all, indent=1))
        (out / "table.txt").write_text(table(where, done, seconds))
    print("\n" + summary(done, time.monotonic() - began))
    print(f"written to {out}")
    return int(any(row.outcome == "failed" for part in done for row in part.rows))


if __name__ == "__main__":
    sys.exit(main())
