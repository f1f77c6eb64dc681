"""`shoal report`: one page that says what happened, in numbers that agree with each other."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import readable
from shoal.cli.main import main
from shoal.launch.sweep import Sweep, file_of
from shoal.observe import curves
from shoal.observe.curves import smooth
from shoal.observe.history import history, speed
from shoal.observe.phases import on_device, parts
from shoal.observe.plot import plot, plot_many
from shoal.observe.time_ledger import ledger
from tests.journal.journals import change_spec, crash_and_finish, loss_at, make_run
from tests.patience import limit


def test_the_page_says_how_it_ended_where_the_time_went_and_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crash_and_finish(make_run(tmp_path))
    assert main(["report", "demo", "--no-png", "--workspace", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert page.startswith(
        "demo: 1M parameters · 2 processes on cpu (dp_replicate 2) · fp32 · commit 0123abcd01 (dirty)"
    )
    assert " · data f00df00d · seed 7\n" in page
    assert "finished: 200 steps are done" in page
    assert "where 2 m 17 s went" in page
    assert "  lost            25.0 s   18.3%" in page
    assert "1 failure, 50 steps done again\n  attempt 0: rank 1: killed (ended by SIGKILL); restarting" in page
    assert "      cost 29.2 s (detection 0.2 s, recovery 4.0 s, lost work 25.0 s); 50 steps lost\n" in page
    assert "Restarts cost 21% of the time (1 failure): with islands (fleet.islands) the others would not " in page
    assert "4.1k tokens/s (median), MFU - (the device's peak is not known)" in page
    assert "500 ms median, 500 ms to 500 ms (5th to 95th percentile), 4.0% of it waiting for data" in page
    assert "410k in 200 steps" in page
    assert f"{loss_at(200):.4f} at the last step" in page
    assert "2 saved, the newest at step 200 (11.4 MiB)" in page
    assert "⣀" in page
    assert "drawn:" not in page
    assert not (tmp_path / "runs" / "demo" / "report").exists()


def test_json_has_the_same_numbers_and_its_ledger_sums_to_its_total(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crash_and_finish(make_run(tmp_path))
    assert main(["report", "demo", "--json", "--workspace", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["ledger"]["parts_s"].values()) == pytest.approx(found["ledger"]["total_s"], abs=1e-6)
    assert found["ledger"]["goodput"] == pytest.approx(96 / found["ledger"]["total_s"])
    assert (found["step"], found["lost_steps"], found["attempts"]) == (200, 50, 2)
    assert found["failures"][0]["signal"] == 9
    (cost,) = found["failure_costs"]
    spent = sum(found["ledger"]["parts_s"][part] for part in ("detection", "recovery", "lost"))
    assert (cost["cause"], cost["rank"], cost["lost_steps"]) == ("killed", 1, 50)
    assert cost["total_s"] == pytest.approx(spent, abs=1e-6)
    assert found["failure_classes"] == {"killed": {"count": 1, "total_s": cost["total_s"], "lost_steps": 50}}
    assert found["advice"]["saves_s"] == pytest.approx(spent - 0.5, abs=1e-3)
    assert found["speed"]["tokens"] == 200 * 2048
    assert found["speed"]["mfu_convention"] == "causal"
    assert found["best_eval_loss"]["step"] == 200
    for picture in found["pictures"]:
        assert Path(picture).read_bytes().startswith(b"\x89PNG")
    assert {Path(p).name for p in found["pictures"]} == {"loss.png", "throughput.png", "rate.png"}


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_hardly_began_has_a_report_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    make_run(tmp_path).open().start().steps(steps).close("failed", 78, "the data is gone")
    assert main(["report", "demo", "--workspace", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert "failed: the data is gone" in page
    assert ("no step was committed" in page) == (steps == 0)
    only_open = make_run(tmp_path, "open-only").open()
    assert main(["report", only_open.run_dir.name, "--workspace", str(tmp_path)]) == 0
    assert "no step was committed" in capsys.readouterr().out


def test_a_loss_that_blew_up_is_reported_as_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = make_run(tmp_path).open().start().steps(20).eval()
    with open(story.run_dir.journal_file, "a") as f:
        f.write(json.dumps({**story.records[-2], "step": 21, "loss": "inf"}) + "\n")
    story.close("failed", 78, "step 21 has loss inf")
    assert main(["report", "demo", "--workspace", str(tmp_path)]) == 0
    assert "inf at the last step" in capsys.readouterr().out
    assert main(["report", "demo", "--json", "--workspace", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    assert found["final_loss"] == "inf"


def test_an_unknown_run_is_refused_with_the_nearest_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crash_and_finish(make_run(tmp_path))
    for verb in (["report", "dem"], ["logs", "dem"], ["track", "sync", "dem"]):
        assert main([*verb, "--workspace", str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("shoal: there is no run 'dem' in ")
        assert "did you mean 'demo'?" in said


def test_a_step_done_twice_counts_as_it_was_done_last(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(20).failure().start(at_step=10).steps(30, loss_shift=1.0).close()
    found = history(story.records)
    assert found.steps.column("step").tolist() == list(range(1, 31))
    assert [
        loss - loss_at(step) for step, loss in zip(*map(found.steps.column, ("step", "loss")), strict=True)
    ] == pytest.approx([0.0] * 10 + [1.0] * 20)
    assert found.lost.column("step").tolist() == list(range(11, 21))
    assert [(b.reached, b.resumed_at, b.failed) for b in found.breaks] == [(20, 10, True)]
    measured = speed(found)
    assert measured is not None
    assert measured.tokens == 30 * 2048


def test_speed_is_that_of_settled_steps_and_of_the_work_they_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 s of compiling in the first steps of either attempt, windows of many documents: neither is in the figures."""
    story = make_run(tmp_path).open()
    for first in (0, 20):
        story.start(at_step=first, peak_flops=1e11)
        story.records[-1] |= {"moved_bytes": 1.2e12, "peak_bandwidth": 4.8e12}
        story.step_s = 20.0
        story.steps(first + 3)
        story.step_s = 0.5
        story.steps(first + 20)
    story.close()
    found = speed(history(story.records))
    assert found is not None
    assert found.tokens_per_s == pytest.approx(4096)
    assert (found.step_s, found.step_p95_s) == pytest.approx((0.5, 0.5))
    assert found.mfu == pytest.approx(4096 * 6e6 / 2e11)
    assert found.hfu == pytest.approx(4096 * 8e6 / 2e11)
    assert found.memory_bytes_per_s == pytest.approx(2.4e12)
    assert found.memory_share == pytest.approx(0.5)
    story.run_dir.journal_file.write_text("".join(json.dumps(r) + "\n" for r in story.records))
    assert main(["report", "demo", "--workspace", str(tmp_path)]) == 0
    told = "4.1k tokens/s (median), MFU 12.3% (causal), HFU 16.4%, memory 2.40 TB/s a device (50% of its bandwidth)"
    assert told in capsys.readouterr().out


def test_the_devices_phases_come_from_its_own_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the host's clock the optimizer takes 213 of 520 ms, since it waits there; the device says otherwise."""
    story = make_run(tmp_path).open().start().steps(9).close()
    phases = {"wait_s": 0.004, "forward_s": 0.15, "backward_s": 0.31, "clip_s": 0.002, "optimizer_s": 0.034}
    for record in story.records:
        if record["kind"] == "step":
            record["time"] = {"data_s": 0.0, "compute_s": 0.307, "optimizer_s": 0.213}
            record["device"] = {"step": record["step"] - 1, **phases}
    assert on_device(story.records[-4:-1]) == pytest.approx(phases)
    assert parts(story.records[-4:-1]) == pytest.approx({"data_s": 0.004, "compute_s": 0.462, "optimizer_s": 0.034})
    story.run_dir.journal_file.write_text("".join(json.dumps(r) + "\n" for r in story.records))
    assert main(["report", "demo", "--workspace", str(tmp_path)]) == 0
    assert "backward 310 ms, norm and sums 2 ms, optimizer 34 ms (median of a step" in capsys.readouterr().out


def test_a_terminal_plot_shows_the_shape_and_the_ends() -> None:
    falling = plot([(float(x), 1000.0 - 10 * x) for x in range(101)], breaks=[50.0], width=20, height=5)
    rows = falling.splitlines()
    assert len(rows) == 7
    assert rows[0].startswith("1k ┤⠙")
    assert rows[4].startswith(" 0 ┤⠀")
    assert rows[4][-1] not in "⠀┤", "the lower right corner of a falling line is not empty"
    assert rows[6].split() == ["0", "100"]
    assert rows[0][-1] == "⠀", "the top right corner of a falling line is empty"
    assert plot([]) == "(nothing to draw)"
    assert plot([(1.0, math.nan)]) == "(nothing to draw)"
    assert plot([(1.0, 2.0)])  # one point, no range
    spike = plot([(float(x), 9.0 if x == 5000 else 1.0) for x in range(10_000)], width=20, height=4)
    assert "⠀" * 20 not in spike.splitlines()[0], "a spike in ten thousand points is not lost"


def drawn(points: list[tuple[float, float]], **how: Any) -> list[str]:
    """The rows of a plot, without the axes; a blank is a space."""
    return [row.partition("┤")[2].replace("⠀", " ").rstrip() for row in plot(points, **how).splitlines()[:-2]]


def test_few_points_are_marked_and_joined_from_edge_to_edge() -> None:
    for count in (2, 3, 5, 12):
        rows = drawn([(float(i), 6.0 - i) for i in range(1, count + 1)], width=30, height=6)
        assert sum(row.count("•") for row in rows) == count
        assert all(any(len(row) > column and row[column] != " " for row in rows) for column in range(30)), "no gap"
    assert sum(row.count("•") for row in drawn([(float(i), 1.0 * i) for i in range(13)])) == 0


def test_one_point_and_a_constant_stand_in_the_middle() -> None:
    rows = drawn([(7.0, 2.5)], width=31, height=5)
    assert [row.strip() for row in rows] == ["", "", "•", "", ""]
    assert plot([(7.0, 2.5)], width=31, height=5).splitlines()[-1].split() == ["7"]
    flat = drawn([(float(i), 2.5) for i in range(100)], width=10, height=5)
    assert [bool(row) for row in flat] == [False, False, True, False, False]


def test_a_line_is_not_drawn_where_there_is_no_number() -> None:
    rows = drawn([(float(i), math.nan if 30 < i < 60 else 1.0) for i in range(100)], width=20, height=3)
    assert re.fullmatch(r"\S+ {4,}\S+", rows[1])


def test_a_huge_range_is_drawn_on_a_logarithmic_axis_that_says_so() -> None:
    text = plot([(float(i), 1e30 if i == 50 else 5 - i / 50) for i in range(100)], width=20, height=5)
    assert text.splitlines()[0].split()[0] == "1e+30"
    assert text.splitlines()[2].split()[0] == "log"
    assert plot([(1.0, -1e308), (2.0, 1e308)])


def test_ends_that_look_alike_get_digits_until_they_differ_and_steps_are_whole() -> None:
    rows = plot([(float(i), 2.5 + i * 1e-7) for i in range(12_346)], height=4).splitlines()
    assert (rows[0].split()[0], rows[3].split()[0]) == ("2.501", "2.5")
    assert rows[-1].split() == ["0", "12,345"]
    near = plot([(1.0, 2.5), (2.0, 2.5000001)], height=4).splitlines()
    assert (near[0].split()[0], near[3].split()[0]) == ("2.5000001", "2.5")


def test_several_curves_have_their_own_letters_and_the_first_is_on_top() -> None:
    rows = plot_many(
        [("A", [(0.0, 1.0), (9.0, 0.0)]), ("B", [(0.0, 1.0), (9.0, 1.0)])], width=10, height=3
    ).splitlines()
    assert rows[0].partition("┤")[2].startswith("A")
    assert rows[0].endswith("B")
    assert rows[2].endswith("A")
    assert plot_many([("A", [])]) == "(nothing to draw)"


def test_smoothing_keeps_the_ends_and_the_mean() -> None:
    straight = np.arange(50.0)
    assert smooth(straight, 9) == pytest.approx(straight)


def test_nothing_of_track_and_observe_imports_torch() -> None:
    code = (
        "import pkgutil, importlib, sys, shoal.track, shoal.observe\n"
        "for p in (shoal.track, shoal.observe):\n"
        "    for m in pkgutil.iter_modules(p.__path__): importlib.import_module(f'{p.__name__}.{m.name}')\n"
        "for v in ('report', 'ps', 'logs', 'track'): importlib.import_module(f'shoal.cli.{v}')\n"
        "heavy = [m for m in ('torch', 'matplotlib', 'mlflow', 'wandb', 'tensorboard', 'pandas') if m in sys.modules]\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr


def test_a_straggler_is_named_in_one_line_and_takes_no_time() -> None:
    slow = {"rank": 3, "phase": "data", "own_s": 0.42, "usual_s": 0.1, "step_s": 0.9, "steps": 20, "attempt": 0}
    assert readable.straggler(slow) == "rank 3 is slow in data: 420 ms a step, the others 100 ms"
    shared = {**slow, "phase": "compute", "by": "device", "ranks": [8, 9, 10]}
    assert readable.straggler(shared) == (
        "one of ranks 8 to 10, which share each layer, is slow in compute: 420 ms a step, the others 100 ms "
        "(forward pass, by the device's clock)"
    )
    steps = [
        {"kind": "step", "t": t + 1.0, "begin": t, "step": i + 1, "attempt": 0} for i, t in enumerate((10.0, 12.0))
    ]
    without = [{"kind": "open", "t": 9.0}, *steps, {"kind": "close", "t": 14.0, "status": "done"}]
    told = [*without[:2], {"kind": "straggler", "t": 11.5, **slow}, *without[2:]]
    assert history(told).stragglers == [told[2]]
    assert ledger(told).parts_us == ledger(without).parts_us


def test_several_runs_are_laid_beside_each_other_the_best_first_with_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, shift, rate in (("a", 0.5, 1e-3), ("b", 0.0, 3e-3), ("c", 1.0, 1e-2)):
        story = make_run(tmp_path, name).open().start().steps(60, loss_shift=shift).close()
        optimizer = {"lr": rate}
        change_spec(story.run_dir, train={"optimizer": optimizer})
    place = ["--workspace", str(tmp_path)]
    assert main(["report", "a", "b", "c", *place]) == 0
    page = capsys.readouterr().out
    assert [line.split()[:2] for line in page.splitlines()[1:4]] == [["A", "b"], ["B", "a"], ["C", "c"]]
    assert re.search(r"train\.optimizer\.lr +0\.003 +0\.001 +0\.01\n\n", page), "one line, since nothing else differs"
    curves = page.partition("loss\n")[2]
    assert all(curves.count(mark) > 20 for mark in "ABC")
    assert (tmp_path / "reports" / "a+b+c.png").stat().st_size > 10_000
    assert main(["report", "c", "a", "--json", "--no-png", *place]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in told["runs"]] == ["a", "c"]
    assert [run["settings"] for run in told["runs"]] == [{"train.optimizer.lr": 1e-3}, {"train.optimizer.lr": 1e-2}]
    assert told["picture"] is None
    assert main(["report", "a", "gone", *place]) == 2
    assert "there is no run 'gone'" in capsys.readouterr().err


def test_a_sweep_is_reported_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--workspace", str(tmp_path)]
    Sweep("lr", {"lr-000": ("seed=1",), "lr-001": ("seed=2",)}, 60, False, file_of("lr", tmp_path)).save()
    assert main(["report", "lr", *place]) == 2
    assert "no run of sweep 'lr' has begun yet" in capsys.readouterr().err
    make_run(tmp_path, "lr-001").open().start().steps(6).close()
    assert main(["report", "lr", "--no-png", *place]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("A  lr-001")


def test_of_few_points_none_lies_above_the_picture(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    for points in ([9.0], [9.0, 8.0], [9.0, 1.0, 1.0, 1.0], [2.0] * 5, [9.0] + [1.0] * 400):
        axes = Figure().add_subplot()
        curves._fit(axes, np.array(points))
        low, high = axes.get_ylim()
        assert low < min(points) <= max(points) < high
    axes = Figure().add_subplot()
    curves._fit(axes, np.array([1e9] + [1.0] * 999))
    assert axes.get_ylim()[1] < 2.0, "one spike among a thousand does not flatten the rest"
