"""`shoal sweep`: which runs it makes, that each is sent once, and that the worse half is stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.journal.journals import Story
from tests.launch.stand_in import pretend
from tests.train.tiny import make_data, make_run

from shoal.cli.main import main
from shoal.data.sources import open_sources
from shoal.data.windows import Windows
from shoal.errors import SetupError, UsageError
from shoal.journal.rundir import RunDir
from shoal.launch import agent, send, sweep, watch
from shoal.launch.backend import Phase, Rendered, State
from shoal.launch.grid import drawn, grid
from shoal.launch.halving import Curve, losers, rungs
from shoal.launch.job import Job
from shoal.launch.request import Request
from shoal.launch.sweep import Drive, Sweep
from shoal.spec import dump, load
from shoal.spec.length import steps_for_epochs
from shoal.spec.run import Run


def test_a_grid_is_every_combination_and_lists_are_one_value() -> None:
    assert grid(["a.b=1,2", "c=[x, y],z"]) == [
        ("a.b=1", "c=[x, y]"), ("a.b=1", "c=z"), ("a.b=2", "c=[x, y]"), ("a.b=2", "c=z"),
    ]  # fmt: skip


def test_draws_are_different_within_their_range_and_the_same_for_the_same_seed() -> None:
    asked = (["d=8,16"], ["lr=1e-4..1e-2:log", "n=1..3", "x=-0.5..0.5"])
    points = drawn(*asked, 40, seed=3)
    assert points == drawn(*asked, 40, seed=3)
    assert points != drawn(*asked, 40, seed=4)
    assert len(set(points)) == 40
    values = [dict(part.split("=") for part in point) for point in points]
    assert {v["d"] for v in values} == {"8", "16"}
    assert {v["n"] for v in values} == {"1", "2", "3"}
    rates = sorted(float(v["lr"]) for v in values)
    assert 1e-4 <= rates[0] < 1e-3 < rates[-1] <= 1e-2
    assert 5e-4 < rates[20] < 2e-3  # half of them below the geometric mean, or so
    assert all(-0.5 <= float(v["x"]) <= 0.5 for v in values)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: grid([]), "say what to vary"),
        (lambda: grid(["lr"]), "not NAME=VALUES"),
        (lambda: grid(["lr=1", "lr=2"]), "given twice"),
        (lambda: grid([f"x{i}=1,2,3,4,5,6,7,8,9,0" for i in range(5)]), "more than 10,000 runs"),
        (lambda: drawn([], ["n=1..3"], 4, 0), "only 3 different ones"),
        (lambda: drawn([], ["lr=0..1:log"], 4, 0), "above 0"),
        (lambda: drawn([], ["lr=2..1"], 4, 0), "the lower first"),
        (lambda: drawn([], ["lr=1,2"], 4, 0), "LOW..HIGH"),
        (lambda: drawn([], ["lr=1..2"], 0, 0), "from 1 to"),
    ],
)
def test_what_cannot_be_swept_is_one_sentence(make: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


def test_runs_are_compared_by_evaluation_else_by_the_mean_of_steps_and_no_number_is_worst(tmp_path: Path) -> None:
    assert rungs(200) == (25, 50, 100)
    assert rungs(3) == (1,)
    story = Story(RunDir.of("a", tmp_path)).open().start()
    curve = Curve(story.run_dir.journal_file, rungs(200))
    story.steps(24)
    curve.refresh()
    assert curve.at(25) is None
    story.steps(50)
    curve.refresh()
    near = [r["loss"] for r in story.records if r["kind"] == "step" and 45 < r["step"] <= 50]
    assert curve.at(50) == pytest.approx(sum(near) / 5)
    story.write("eval", step=50, loss=1.25)
    story.write("eval", step=51, loss="nan")
    curve.refresh()
    assert curve.at(50) == 1.25
    assert curve.last_eval == math.inf
    assert losers({"a": 1.0, "b": math.inf, "c": 2.0}) == ["b"]
    assert losers({"a": 1.0, "b": 1.0}) == ["b"]
    assert losers({"a": math.inf}) == []


class Scheduler:
    """Keeps what it was sent; a test says how each goes."""

    name = "local"

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.says: dict[str, State] = {}
        self.told: list[str] = []

    def submit(self, request: Request) -> Job:
        self.sent.append(request.name)
        self.says[request.name] = State("running", "it runs")
        launch = request.launch
        return Job(request.name, "local", request.name, 0.0, launch.nodes, 0, request.there, request.bundle.sha256)

    def states(self, jobs: Sequence[Job]) -> Mapping[str, State]:
        return {job.id: self.says[job.id] for job in jobs}

    def stop(self, job: Job, now: bool) -> None:
        self.told.append(job.run)
        self.ends(job.run, "stopped", 143)

    def ends(self, run: str, phase: Phase, code: int) -> None:
        self.says[run] = State(phase, f"code {code}", exit_code=code)


class WithArrays(Scheduler):
    arrays = 0

    def render_array(self, requests: Sequence[Request], at_once: int) -> list[Rendered]:
        return [Rendered("job.sbatch", f"{len(requests)} of them, {at_once} at once\n")]

    def submit_array(self, requests: Sequence[Request], at_once: int) -> list[Job]:
        self.arrays += 1
        return [self.submit(request) for request in requests]


def use(monkeypatch: pytest.MonkeyPatch, scheduler: Scheduler) -> Scheduler:
    for module in (send, sweep, watch):
        monkeypatch.setattr(module, "backend_of", lambda of: scheduler)
    monkeypatch.setattr(sweep, "backend", lambda name: scheduler)
    return scheduler


def driven(folder: Path, runs: int, at_once: int, early: bool = False) -> Drive:
    base = Run.model_validate({"name": "s", "data": {"train": "/data"}, "train": {"steps": 80}})
    points = [(f"seed={i}",) for i in range(runs)]
    made = Sweep.of("s", points, base, early, folder)
    made.save()
    requests = {name: send.request_of(base.model_copy(update={"name": name}), folder) for name in made.points}
    return Drive(made, requests, at_once, say=lambda text: None)


def test_so_many_at_once_each_once_and_a_second_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    them = use(monkeypatch, Scheduler())
    drive = driven(tmp_path, runs=5, at_once=2)
    assert drive.turn()
    assert drive.turn()
    assert them.sent == ["s-000", "s-001"]
    them.ends("s-000", "done", 0)
    them.ends("s-001", "failed", 75)
    assert drive.turn()
    assert them.sent[2:] == ["s-002", "s-003"]
    them.ends("s-002", "failed", 78)
    them.ends("s-003", "done", 0)

    again = driven(tmp_path, runs=5, at_once=2)  # the first command was stopped; what can be cured gets another start
    assert again.turn()
    assert them.sent[4:] == ["s-001", "s-004"]
    for run in ("s-001", "s-004"):
        them.ends(run, "failed", 75)
    assert not again.turn()  # once in the life of a command
    assert len(them.sent) == 6


def test_what_a_retry_cannot_help_is_known_also_when_the_scheduler_has_forgotten_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    them = use(monkeypatch, Scheduler())
    assert driven(tmp_path, runs=2, at_once=2).turn()
    for run, code in (("s-000", 78), ("s-001", 75)):
        Story(RunDir.of(run, tmp_path)).open().start().steps(3).close("failed", code, "it failed")
        them.says[run] = State("gone", "it is not known any more")
    assert driven(tmp_path, runs=2, at_once=2).turn()
    assert them.sent == ["s-000", "s-001", "s-001"]


def test_a_scheduler_with_arrays_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    them = WithArrays()
    use(monkeypatch, them)
    drive = driven(tmp_path, runs=30, at_once=4)
    assert drive.turn()
    assert drive.turn()
    assert (them.arrays, len(them.sent)) == (1, 30)


def test_a_sweep_of_which_nothing_could_be_sent_leaves_its_name_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away(Scheduler):
        def submit(self, request: Request) -> Job:
            raise SetupError("it is not there; install it.")

    use(monkeypatch, Away())
    with pytest.raises(SetupError):
        driven(tmp_path, runs=2, at_once=1).run()
    assert not list(tmp_path.glob("runs/*"))
    use(monkeypatch, Scheduler())
    assert driven(tmp_path, runs=3, at_once=1).turn()


def test_the_worse_half_is_stopped_at_a_rung_and_never_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    them = use(monkeypatch, Scheduler())
    drive = driven(tmp_path, runs=4, at_once=4, early=True)
    drive.turn()
    stories = [Story(RunDir.of(f"s-{i:03}", tmp_path)).open().start() for i in range(4)]
    for i, story in enumerate(stories):
        story.steps(9)
        story.write("eval", step=10, loss=[2.0, 1.0, "nan", 3.0][i])
    drive.turn()
    assert them.told == []  # none has come to step 10
    for story in stories:
        story.steps(12)
    assert drive.turn()
    assert sorted(them.told) == ["s-002", "s-003"]
    them.ends("s-000", "done", 0)
    them.ends("s-001", "done", 0)
    assert not drive.turn()
    assert not driven(tmp_path, runs=4, at_once=4, early=True).turn()
    assert len(them.sent) == 4
    table = sweep.rows(Sweep.read("s", tmp_path), tmp_path)
    assert [(row.run, row.status) for row in table[2:]] == [("s-003", "stopped early"), ("s-002", "stopped early")]
    assert table[0].run == "s-001"
    assert "worse than half of the others at step 10 (loss 3)" in table[2].why


def test_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOAL_WORKSPACE", raising=False)
    make_data(tmp_path / "data", documents=4)
    (tmp_path / "run.yaml").write_text("name: s\ndata: {train: data, seq_len: 32}\ntrain: {steps: 20}\n")
    pretend(monkeypatch, "0")
    monkeypatch.setitem(sweep.LOOK_EVERY_S, "local", 0.02)
    command = ["sweep", "run.yaml", "--grid", "train.optimizer.lr=1e-3,3e-4", "--grid=seed=1,2", "--at-once", "4"]
    assert main([*command, "--render"]) == 0
    assert capsys.readouterr().out.count("# --- s-00") == 4
    assert not (tmp_path / ".shoal").exists()
    assert main(["sweep", "run.yaml", "--grid", "train.optimizer.lr=1e-3,-1"]) == 2
    assert "train.optimizer.lr" in capsys.readouterr().err
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert err.count("sent s-00") == 4
    assert out.splitlines()[0].split() == ["RUN", "train.optimizer.lr", "seed", "STATUS", "STEP", "LOSS", "EVAL", "WHY"]
    assert main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    assert "sent" not in err
    assert {row["status"] for row in json.loads(out)} == {"finished"}
    assert load(RunDir.of("s-000", tmp_path).path / "job.yaml").run.track.group == "s"  # as trackers show it
    assert main(["sweep", "--status", "s"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert main(["sweep", "run.yaml", "--grid", "seed=1,2"]) == 2
    assert "sweep 's' exists with other runs" in capsys.readouterr().err


def test_epochs_of_a_sweep_are_counted_here_or_on_the_nodes(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data", documents=20)
    run = make_run(data, **{"train.steps": "auto", "train.epochs": 2, "train.batch": 4})
    here = send.where_known(run, tmp_path)
    windows = Windows(open_sources(run.data.train, run.data, tmp_path), 32, True)
    assert here.steps == steps_for_epochs(2, sum(windows.sizes), 4)
    there = run.model_copy(update={"launch": run.launch.model_copy(update={"on": "kubernetes", "image": "x"})})
    assert send.where_known(there, tmp_path).train.steps == "auto"
    assert Sweep.of("s", [("seed=1",)], there, False, tmp_path).total is None
    with pytest.raises(UsageError, match=r"--stop-early .* set train\.steps or train\.tokens"):
        Sweep.of("s", [("seed=1",)], there, True, tmp_path)


def test_an_agent_counts_the_epochs_once_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_data(tmp_path / "data", documents=20)
    run = make_run(data, **{"train.steps": "auto", "train.epochs": 4, "resources.processes": 1})
    (tmp_path / "run.yaml").write_text(dump(run))
    seen: dict[str, Any] = {}

    def supervise(run_dir: RunDir, run: Run, world: int, **how: Any) -> int:
        seen.update(run=run, **how)
        return 0

    monkeypatch.setattr(agent, "supervise", supervise)
    assert agent.first(agent.Who.of({}), tmp_path / "run.yaml", tmp_path, 1, 1) == 0
    decided = {d.key: d.value for d in seen["decisions"]}
    assert decided["train.steps"] == seen["run"].steps == load(RunDir.of("tiny", tmp_path).spec_file).run.steps
