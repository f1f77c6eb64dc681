"""`shoal plan review`: every rule finds what it is for and is silent about the neighbour; nothing makes one crash."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.cli.main import main
from shoal.plan.asked import Asked
from shoal.plan.catalogue import find
from shoal.plan.failures import DEFAULT
from shoal.plan.machine import Machine
from shoal.plan.restarts import style
from shoal.plan.review import (
    attention_waste,
    batch_size,
    expert_split,
    headroom,
    muon_work,
    own_mesh,
    save_interval,
    slow_links,
    stage_cut,
    widths,
)
from shoal.plan.review.every_rule import RULES, Reviewed, Rule, merged, review
from shoal.plan.review.finding import Finding, Severity, order
from shoal.plan.review.sizes import SIZES, at_sizes, ends, too_large
from shoal.plan.review.subject import Subject
from shoal.plan.search import search
from shoal.spec.presets import presets
from shoal.spec.resolve import load
from shoal.spec.run import Run
from shoal.spec.shape import shape_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
H100 = Machine.of(find("h100"))


def asked(preset: str, devices: int, changes: dict[str, Any], machine: Machine = H100) -> Asked:
    """A preset with dotted `changes`."""
    model = {"vocab_size": 32768, **copy.deepcopy(presets()[preset].model)}
    values: dict[str, Any] = {"name": "reviewed", "model": model, "data": {"train": "nowhere", "seq_len": 4096}}
    values["train"] = {"steps": 100_000, "batch": 256, "compile": True}
    for name, value in changes.items():
        section, (*path, last) = values, name.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    run = Run.model_validate(values)
    return Asked(run, shape_of(run.model), machine, devices)


def reviewed(preset: str, devices: int, changes: dict[str, Any]) -> Reviewed:
    return review(asked(preset, devices, changes), DEFAULT, style("supervised", 1))


PIPELINE = {"mesh.pp": 4, "mesh.schedule": "1f1b", "mesh.micro_batch": 1}
UNEVEN = PIPELINE | {"mesh.pp": 8, "mesh.tp": 2, "mesh.cp": 2, "train.batch": 2048}
LONG = {"data.seq_len": 131072, "model.max_seq_len": 131072, "train.batch": 8}
ALONE = {"mesh.cp": 1, "mesh.tp": 1, "mesh.pp": 1, "mesh.micro_batch": 1}
SLIDING = {"data.seq_len": 32768, "model.max_seq_len": 32768, "model.sliding_window": 2048}
MASKED = {"mesh.cp": 1, "data.mask_documents": False}
SHARDED = {"mesh.cp": 1, "mesh.tp": 1, "mesh.pp": 1, "mesh.dp_replicate": 1}
FP8 = {"train.precision": "fp8", "model.vocab_size": 50264}
ONE_KEY_HEAD = {"model.kv_heads": 1, "train.batch": 8}
AGAIN = {"mesh.recompute": "full"}
SEVEN = SHARDED | {"model.experts.count": 7}
MANY = SHARDED | {"model.experts.top_k": 4}
WAITS = SHARDED | {"checkpoint.background": False}
MUON = {"train.optimizer.name": "muon", "train.batch": 64}
LARGE = {"train.batch": 8192, "mesh.tp": 1}
WIDE = {"model.experts.count": 8, "model.experts.top_k": 2, "model.experts.ffn_dim": 12288}  # as many parameters

# The rule, a run that it is for, what it says of it, and what makes it silent.
CASES: list[tuple[Rule, str, int, dict[str, Any], str, dict[str, Any]]] = [
    (stage_cut.uneven_stages, "llama3-70b", 64, UNEVEN, "layers 60 to 70", {"model.layers": 79}),
    (stage_cut.bubble, "llama3-8b", 16, PIPELINE | {"train.batch": 32}, "gets 16 micro-batches", {"train.batch": 2048}),
    (stage_cut.tied_over_stages, "llama3.2-1b", 8, PIPELINE, "263M numbers", {"mesh.schedule": "zbv"}),
    (slow_links.tensor_over_nodes, "llama2-7b", 16, {"mesh.tp": 16}, "inside the 8 devices", {"mesh.tp": 8}),
    (slow_links.sequence_traffic, "llama3-8b", 64, {"mesh.cp": 8}, "leaves 512 tokens", {"mesh.cp": 1}),
    (slow_links.narrow_heads, "llama3-8b", 64, ONE_KEY_HEAD, "kv_heads 1", {"model.kv_heads": 8}),
    (slow_links.islands_apart, "llama3-8b", 64, {"fleet.islands": 8}, "8 islands trade", {"fleet.islands": 1}),
    (widths.unaligned, "llama3-8b", 8, {"model.vocab_size": 50257}, "50,257", {"model.vocab_size": 50304}),
    (widths.unaligned, "llama3-8b", 8, {"model.ffn_dim": 14333}, "14,333", {"model.ffn_dim": 14336}),
    (widths.head_in_16_bits, "llama3-8b", 8, FP8, "50,264", {"model.vocab_size": 50272}),
    (widths.partly_filled_tiles, "smollm2-135m", 8, {}, "model.dim = 576", {"model.dim": 640, "model.head_dim": 128}),
    (widths.odd_heads, "llama3-8b", 8, {"model.head_dim": 80}, "head_dim 80", {"data.mask_documents": False}),
    (expert_split.unsplit_experts, "mixtral-8x7b", 16, SEVEN, "7 and 16", {"model.experts.count": 8}),
    (expert_split.expert_traffic, "qwen3-30b-a3b", 64, SHARDED | {"mesh.ep": 64}, "over the network", {"mesh.ep": 1}),
    (expert_split.thin_experts, "qwen3-30b-a3b", 8, SHARDED, "64 experts of width 1,536", WIDE),
    (expert_split.dense_in_disguise, "mixtral-8x7b", 64, MANY, "4 of 8", {"model.experts.top_k": 2}),
    (headroom.needless_recompute, "llama3.2-1b", 8, AGAIN, "room to keep", {"mesh.recompute": "auto"}),
    (headroom.dear_recompute, "llama3-8b", 8, LONG | ALONE, "Recomputing (full)", {"data.seq_len": 4096}),
    (headroom.nothing_left_to_drop, "llama3-8b", 8, LONG | ALONE, "data.seq_len 131,072", {"mesh.cp": 8}),
    (attention_waste.unseen_tokens, "llama3-8b", 16, SLIDING | {"mesh.cp": 4}, "1,984 others", {"mesh.cp": 1}),
    (attention_waste.unseen_tokens, "llama3-8b", 16, SLIDING | MASKED, "by a mask", {"data.mask_documents": True}),
    (batch_size.small_batch, "llama3-8b", 64, {"train.batch": 64}, "1 window of 4,096", {"train.batch": 1024}),
    (own_mesh.slower_mesh, "llama3-8b", 64, {"mesh.tp": 8}, "The mesh that is named (tp 8)", {"mesh.tp": 1}),
    (muon_work.muon_work, "llama3-8b", 64, MUON, "224 matrices", {"train.optimizer.name": "adamw"}),
    (muon_work.muon_work, "llama3-8b", 64, MUON | {"mesh.tp": 8}, "on every process", LARGE),
    (save_interval.saves, "llama3-8b", 64, {"checkpoint.every": 0}, "at the end only", {"checkpoint.every": "10 min"}),
    (save_interval.saves, "llama3-8b", 8, {"checkpoint.every": "5 s"}, "takes 48.2 s", {"checkpoint.every": "2 min"}),
    (save_interval.waiting_for_saves, "llama3-70b", 64, WAITS, "wait 52.9 s", {"checkpoint.background": True}),
]  # fmt: skip


def findings_of(
    rule: Rule, preset: str, devices: int, changes: dict[str, Any], way: str = "supervised"
) -> list[Finding]:
    about, islands = asked(preset, devices, changes), changes.get("fleet.islands", 1)
    best = search(about, 1)[0]
    assert best.fits
    return list(rule(Subject(about, best, DEFAULT, style("islands" if islands > 1 else way, islands))))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[4][:12]}")
def test_a_rule_finds_what_it_is_for_and_not_its_neighbour(
    case: tuple[Rule, str, int, dict[str, Any], str, dict[str, Any]],
) -> None:
    rule, preset, devices, changes, says, cure = case
    (found,) = findings_of(rule, preset, devices, changes)
    assert says in found.what
    assert found.severity != Severity.REFUSED
    _is_sound(found)
    assert findings_of(rule, preset, devices, changes | cure) == []


def test_every_rule_is_in_the_table() -> None:
    tried = {case[0] for case in CASES} | {save_interval.failures}
    assert tried == {rule for rules in RULES.values() for rule in rules}


def test_failures_that_leave_little_are_said_with_the_way_of_coming_back() -> None:
    large = SHARDED | {"train.batch": 65536, "mesh.dp_replicate": "auto"}
    (found,) = findings_of(save_interval.failures, "llama3.2-1b", 4096, large, "manual")
    assert "coming back (manual) leaves" in found.what
    assert findings_of(save_interval.failures, "llama3.2-1b", 4096, large) == []


def test_numbers_are_the_planners_own() -> None:
    """What a change is said to gain is what the changed run gains when it is planned."""
    (uneven,) = findings_of(stage_cut.uneven_stages, "llama3-70b", 64, UNEVEN)
    left = re.search(r"model.layers 79 would make it ([0-9.]+)%", uneven.change)
    assert left is not None
    assert uneven.share is not None
    waiting = []
    for layers in (80, 79):
        (best,) = search(asked("llama3-70b", 64, UNEVEN | {"model.layers": layers}), 1)
        waiting.append(best.parts["pipeline"] / best.seconds)
    assert waiting[0] - waiting[1] == pytest.approx(uneven.share - float(left[1]) / 100, abs=0.005)
    (slower,) = findings_of(own_mesh.slower_mesh, "llama3-8b", 64, {"mesh.tp": 8})
    named, best = (search(asked("llama3-8b", 64, changes), 1)[0] for changes in ({"mesh.tp": 8}, {}))
    assert slower.share == pytest.approx(1 - best.seconds / named.seconds)


def test_what_hurts_most_comes_first() -> None:
    findings = reviewed("llama3-8b", 64, MUON | {"mesh.tp": 8, "model.vocab_size": 50264}).findings
    assert len(findings) > 2
    assert list(findings) == sorted(findings, key=order)
    shares = [one.share for one in findings if one.severity == Severity.HURTS and one.share]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(
    ("changes", "rule", "code", "what", "change"),
    [
        ({"mesh.tp": 3}, "no-layout", 2, "cannot be split over mesh.tp 3", "The nearest mesh that works"),
        ({"train.batch": 7, "mesh.pp": 1, "mesh.cp": 1, "mesh.tp": 1}, "no-layout", 2, "train.batch 7", "would do"),
        ({"train.precision": "fp8", "mesh.tp": 2}, "no-layout", 2, "fp8 and mesh.tp", "Take bf16, or tp 1."),
        ({"train.precision": "fp8", "model.dim": 4104, "model.head_dim": 128}, "no-layout", 2, "4104", "Make it 4096"),
        (LONG | ALONE | {"data.seq_len": 196608}, "does-not-fit", 78, "needs", "With the mesh left open"),
    ],
)  # fmt: skip
def test_what_will_be_refused_is_said_by_the_rules_that_refuse_it(
    changes: dict[str, Any], rule: str, code: int, what: str, change: str
) -> None:
    (found,) = reviewed("llama3-8b", 8, changes).findings
    assert (found.severity, found.rule, found.code) == (Severity.REFUSED, rule, code)
    assert what in found.what
    assert change in found.change


@pytest.mark.parametrize("name", list(presets()))
def test_every_preset_is_reviewed(name: str) -> None:
    longest = int(presets()[name].model.get("max_seq_len", 4096))
    about = asked(name, 8, {"data.seq_len": min(4096, longest)}, replace(H100, memory=2e12))
    one = review(about, DEFAULT, style("supervised", 1))
    assert one.works
    for finding in one.findings:
        _is_sound(finding)


# Shoal knows the model of no script and no batch; and the planner not what DeepSpeed holds, which it says.
UNPLANNED = ("script.yaml", "batch.yaml", "generate.yaml", "deepspeed.yaml")
TASKS = EXAMPLES / "evaluate"  # task files, no run files
TRAINED = sorted(p for p in EXAMPLES.rglob("*.yaml") if p.name not in UNPLANNED and p.parent != TASKS)


@pytest.mark.parametrize("path", TRAINED, ids=lambda p: p.name)
def test_every_example_is_reviewed(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_WORKSPACE", str(tmp_path))
    text = path.read_text()
    overrides = ["model.vocab_size=4096"]
    if "weights:" in text:
        overrides += ["model.weights=null"]
    if "epochs:" in text:
        overrides += ["train.epochs=null", "train.steps=100"]
    devices = 8 * load(path, overrides).run.fleet.islands
    code = main(["plan", "review", str(path), *overrides, "--on", "h100", "--devices", str(devices), "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    said = json.loads(out)
    refused = [one for one in said["findings"] if one["severity"] == "will be refused"]
    assert code in ((2, 78) if refused else (0,))


def test_a_healthy_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = _said(tmp_path, capsys, "model: {preset: llama3-8b}", "train.batch=1024", "--devices", "32")
    assert code == 0
    lines = out.splitlines()
    assert lines[-1].startswith("Nothing found. Looked at: what the rules of a mesh refuse,")
    assert len(lines) == 4


def test_the_first_size_that_stops_is_told_where_no_size_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = "model: {preset: llama3.2-1b, kv_heads: 1, vocab_size: 50257, layers: 6}"
    code, out = _said(tmp_path, capsys, narrow, "train.batch=48", "mesh.cp=1")
    assert code == 0  # at some sizes it can be trained
    rows = {int(line.split()[0].replace(",", "")): line for line in out.splitlines() if line.strip()[:1].isdigit()}
    assert list(rows) == list(SIZES)
    assert "tokens" not in rows[8]
    assert "micro_batch" in rows[8]
    assert "No layout of 4,096 devices can train this run" in rows[4096]
    assert "tp 1 (heads 32, kv_heads 1, ffn_dim 8192, vocab_size 50257)" in out
    assert "pp 6 (layers); data parallelism 48 (train.batch)" in out


def test_a_finding_of_several_sizes_is_said_once_where_it_is_worst() -> None:
    """Data parallelism that is named for one size is open for the others."""
    changes = {"train.batch": 4096, "checkpoint.every": 100_000, "data.seq_len": 2048} | ALONE | {"mesh.dp_shard": 8}
    sizes = at_sizes(lambda n: asked("small", n, changes), DEFAULT, style("supervised", 1))
    assert [one.asked.devices for one in sizes] == list(SIZES)
    assert all(one.works for one in sizes)
    pairs = {finding.rule: (finding, seen) for finding, seen in merged(sizes)}
    finding, seen = pairs["save-interval"]
    assert len(seen) > 1
    assert finding.devices in seen
    same = [one for size in sizes for one in size.findings if one.rule == finding.rule]
    assert finding.share == max(one.share or 0.0 for one in same if one.severity == finding.severity)


def test_sizes_stop_being_looked_at_where_a_device_does_less_than_half() -> None:
    sizes = at_sizes(
        lambda n: asked("small", n, {"data.seq_len": 1024, "train.batch": 32}), DEFAULT, style("manual", 1)
    )
    assert too_large(sizes) == (64, 8)
    assert [bool(one.findings) for one in sizes] == [True, True, False, False]  # manual: failures always cost something
    assert all(one.works for one in sizes)
    assert {finding.devices for finding, _ in merged(sizes)} <= {8, 64}


def test_sizes_are_what_islands_can_share_and_a_way_of_coming_back_asks_for() -> None:
    changes = {"data.seq_len": 1024, "train.batch": 32, "fleet.islands": 3}
    sizes = at_sizes(lambda n: asked("small", n, changes), DEFAULT, style("islands", 3))
    assert [one.asked.devices for one in sizes] == [6, 63, 510, 4095]
    ((refused, seen),) = merged(sizes)
    assert (refused.code, seen) == (2, [4095])
    assert "train.batch 32 cannot be cut into shards for 3 islands" in refused.what
    islands = style("islands", 1)  # 16 of them, of a node each
    assert [
        one.asked.devices
        for one in at_sizes(lambda n: asked("small", n, changes | {"fleet.islands": 1}), DEFAULT, islands)
    ] == [512, 4096]


def test_axes_end_where_the_mesh_rules_say() -> None:
    assert ends(asked("qwen3-30b-a3b", 8, {})) == {
        "tp": "4 (heads 32, kv_heads 4, ffn_dim 6144, vocab_size 151936)",
        "pp": "48 (layers)",
        "data parallelism": "256 (train.batch)",
        "cp": "2,048 (data.seq_len 4,096)",
        "ep": "128 (experts)",
    }
    assert ends(asked("llama3-8b", 8, {"train.precision": "fp8"}))["tp"] == "1 (train.precision fp8)"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["review"], 2, "one file is needed: `shoal plan review RUN.yaml`"),
        (["reviw", "run.yaml"], 2, "did you mean `shoal plan review run.yaml`?"),
        (["review", "run.yaml", "--top", "3"], 2, "--top is an option of `shoal plan RUN.yaml`"),
        (["review", "run.yaml", "--devices", "8,64"], 2, "--devices 8,64: a plan is for one of them"),
        (["review", "run.yaml", "model.headz=3"], 2, "model.heads"),
        (["review", "run.yaml", "mesh.tp=3"], 2, "cannot be split over mesh.tp 3"),
        (["review", "nowhere.yaml"], 2, "there is no run file nowhere.yaml"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(_run_file("model: {preset: llama3-8b}"))
    assert main(["plan", *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err


def test_what_is_refused_on_these_devices_exits_as_a_plan_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = _said(tmp_path, capsys, "model: {preset: llama3-8b}", "--devices", "7", "mesh.pp=1", "train.batch=8")
    assert code == 2
    assert "will be refused\n  No layout of 7 devices can train this run" in out
    code, out = _said(tmp_path, capsys, "model: {preset: llama3-8b}", "--devices", "1", "train.batch=8")
    assert code == 78
    assert "will be refused\n  No layout fits" in out


def test_a_review_needs_no_torch(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(_run_file("model: {preset: tiny, vocab_size: 512}"))
    program = (
        "import sys; from shoal.cli.main import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    words = ["plan", "review", str(file), "data.seq_len=512", "--on", "h100", "--devices", "2"]
    subprocess.run([sys.executable, "-c", program, *words], check=True, stdout=subprocess.DEVNULL)


SPECS = st.fixed_dictionaries(
    {
        "model.layers": st.integers(1, 12),
        "model.heads": st.sampled_from([1, 3, 4, 6, 7, 8, 16]),
        "model.kv_heads": st.just("auto"),
        "model.head_dim": st.sampled_from([8, 16, 40, 64, 80, 128]),
        "model.dim": st.sampled_from([8, 100, 128, 576, 1024]),
        "model.ffn_dim": st.sampled_from([7, 64, 500, 1024]),
        "model.vocab_size": st.sampled_from([17, 257, 4096, 50257]),
        "model.tie_embeddings": st.booleans(),
        "model.sliding_window": st.sampled_from([None, 1, 100, 512]),
        "model.experts": st.sampled_from([None, (2, 1, 0), (7, 2, 1), (8, 8, 0), (16, 4, 2)]),
        "data.seq_len": st.sampled_from([1, 96, 512, 2048]),
        "data.mask_documents": st.booleans(),
        "train.batch": st.sampled_from([1, 6, 32, 64]),
        "train.precision": st.sampled_from(["auto", "fp32", "bf16", "fp8"]),
        "train.compile": st.booleans(),
        "train.kernels": st.sampled_from(["auto", "plain"]),
        "train.optimizer.name": st.sampled_from(["adamw", "muon"]),
        "mesh.pp": st.sampled_from(["auto", 1, 2, 4]),
        "mesh.tp": st.sampled_from(["auto", 1, 2]),
        "mesh.cp": st.sampled_from(["auto", 1, 2]),
        "mesh.recompute": st.sampled_from(["auto", "none", "full"]),
        "checkpoint.every": st.sampled_from(["auto", 0, 7, "3 s", "10 min"]),
        "checkpoint.background": st.booleans(),
        "fleet.islands": st.sampled_from([1, 1, 2]),
    }
)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(SPECS, st.sampled_from([1, 2, 6, 8, 16]), st.sampled_from(["h100", "cpu", "tpu v5p"]))
def test_no_rule_crashes_on_whatever_can_be_asked(changes: dict[str, Any], devices: int, on: str) -> None:
    changes = dict(changes)
    experts = changes.pop("model.experts")
    if experts:
        count, top_k, shared = experts
        changes["model.experts"] = {"count": count, "top_k": top_k, "shared": shared, "ffn_dim": 96}
    islands = changes["fleet.islands"]
    devices *= islands
    machine = Machine.of(find(on))
    about = asked("tiny", devices, changes, machine.divided(devices) if on == "cpu" else machine)
    one = review(about, DEFAULT, style("supervised", 1))
    assert one.works or one.findings
    for finding in one.findings:
        _is_sound(finding)


def _is_sound(finding: Finding) -> None:
    """A sentence for a person, and numbers for JSON."""
    assert finding.what.endswith(".")
    assert finding.change.endswith(".")
    assert "nan" not in finding.what.split()
    assert "inf" not in finding.what.split()
    assert finding.share is None or finding.share >= 0
    json.loads(json.dumps(finding.as_json(), allow_nan=False))


def _run_file(model: str) -> str:
    return f"name: reviewed\n{model}\ndata: {{train: nowhere, seq_len: 4096}}\ntrain: {{steps: 1000, batch: 64}}\n"


@pytest.mark.skipif(bool(shutil.which("nvidia-smi") or shutil.which("amd-smi")), reason="this machine has some")
def test_a_run_for_more_devices_than_this_machine_has_cores_is_not_reviewed_on_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "llama-8b-64-gpus.yaml"
    assert main(["plan", "review", str(example)]) == 0
    assert "on 64 H100 SXM" in (out := capsys.readouterr().out)
    assert "no machine is named, and this one has no accelerator" in out


def _said(folder: Path, capsys: pytest.CaptureFixture[str], model: str, *words: str) -> tuple[int, str]:
    file = folder / "run.yaml"
    file.write_text(_run_file(model))
    code = main(["plan", "review", str(file), *words, "--on", "h100", "--workspace", str(folder)])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out
