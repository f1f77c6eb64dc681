"""`shoal plan` and its words as a person types them: what is printed, and what is wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from tests.plan.table import table

RUN = """\
name: planned
model: {preset: llama3.2-1b}
data: {train: nowhere, seq_len: 4096}
train: {steps: 1000, batch: 64, compile: false}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("SHOAL_WORKSPACE", "SHOAL_HARDWARE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.yaml").write_text(RUN)


class Shoal:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, words: str) -> tuple[int, str, str]:
        code = main(["plan", *words.split()])
        out, err = self._capsys.readouterr()
        return code, out, err

    def said(self, words: str) -> str:
        code, out, err = self(words)
        assert (code, err) == (0, "")
        return out

    def json(self, words: str) -> Any:
        return json.loads(self.said(f"{words} --json"), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture
def shoal(capsys: pytest.CaptureFixture[str]) -> Shoal:
    return Shoal(capsys)


def test_a_plan_says_what_to_expect_why_and_what_would_change_it(shoal: Shoal) -> None:
    out = shoal.said("run.yaml --on h100 --devices 16 --top 3")
    lines = out.splitlines()
    assert lines[0] == (
        "planned: 1.24B parameters, 64 x 4,096 tokens a step in bf16, on 16 H100 SXM (8 a node, ib-ndr between nodes)"
    )
    table_of = lines[3:6]
    assert [line.split()[0] for line in table_of] == ["1", "2", "3"]
    for part in ("A step of layout 1: ", "Its memory at its worst", "MFU ", "Goodput ", "The whole run: ", "Price: $"):
        assert part in out
    assert sum(line.startswith("With ") for line in lines) == 5
    assert "tokens/s with" in out


def test_a_plan_as_json_sums_up(shoal: Shoal) -> None:
    found = shoal.json("run.yaml --on h100 --devices 16 --price 3")
    assert (found["device"], found["devices"], found["fabric"]) == ("H100 SXM", 16, "ib-ndr")
    for layout in found["layouts"]:
        mesh = layout["mesh"]
        assert mesh["pp"] * mesh["dp_replicate"] * mesh["dp_shard"] * mesh["cp"] * mesh["tp"] == 16
        assert sum(layout["parts_s"].values()) == pytest.approx(layout["step_s"])
        assert layout["tokens_s"]["expected"] == pytest.approx(64 * 4096 / layout["step_s"])
        assert layout["usd"]["expected"] == pytest.approx(layout["days"]["expected"] * 24 * 3 * 16)
        assert layout["days"]["low"] < layout["days"]["expected"] < layout["days"]["high"]
    assert len(found["what_if"]) == 5
    billions = 64 * 4096 * 1000 / 1e9
    usd = found["layouts"][0]["usd"]["expected"]
    assert found["layouts"][0]["usd_per_billion_tokens"]["expected"] == pytest.approx(usd / billions)


def test_without_a_machine_it_is_this_one_and_values_of_the_run_file_can_be_set(shoal: Shoal) -> None:
    found = shoal.json("run.yaml --on cpu model.preset=tiny model.vocab_size=512 data.seq_len=128 train.batch=8")
    assert found["device"] == "CPU"
    assert found["parameters"] < 5e6
    named = shoal.json("run.yaml --on h100 mesh.tp=2 mesh.recompute=full resources.processes=4")
    assert {layout["mesh"]["tp"] for layout in named["layouts"]} == {2}
    assert {layout["mesh"]["recompute"] for layout in named["layouts"]} == {"full"}
    assert named["devices"] == 4


def test_compare_has_a_row_for_each_machine_and_fabric_by_cost(shoal: Shoal, tmp_path: Path) -> None:
    words = "compare run.yaml --on h100,mi300x --fabric ib,ethernet --devices 8,16"
    out = shoal.said(f"{words} --chart charts/all.png")
    lines = out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("machine"))
    rows = [line.split("  ")[0] for line in lines[head + 1 : head + 7]]
    # Two fabrics on 16; on 8 devices, which are one node, none is needed.
    assert sorted(rows) == ["H100 SXM"] * 3 + ["MI300X"] * 3
    assert out.count("none needed") == 2
    assert "The cheapest is" in out or "Both the cheapest and the fastest is" in out
    assert "H100 SXM, ib-ndr: strong" in out or "H100 SXM, ethernet-100: strong" in out
    found = shoal.json(words)
    usd = [row["usd"]["expected"] for row in found["rows"]]
    assert usd == sorted(usd)
    assert len(found["rows"]) == 6
    assert found["cheapest"] == {name: found["rows"][0][name] for name in ("device", "fabric", "devices")}
    fastest = min(found["rows"], key=lambda row: row["days"]["expected"])
    assert found["fastest"]["devices"] == fastest["devices"] == 16
    assert {one["device"] for one in found["scaling"]} == {"H100 SXM", "MI300X"}
    assert [p["devices"] for p in found["scaling"][0]["strong"]] == [8, 16]
    assert [p["batch"] for p in found["scaling"][0]["weak"]] == [64, 128]
    png = (tmp_path / "charts/all.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width > 1500
    assert height > 700
    assert not list(tmp_path.glob("charts/*.part.png"))


def test_compare_tells_machines_that_cannot_and_prices_that_nobody_knows(shoal: Shoal) -> None:
    out = shoal.said("compare run.yaml --on h100,t4 model.preset=llama3-8b --devices 4,8")
    refused = [line for line in out.splitlines() if line.startswith("not on ")]
    assert refused[0].startswith("not on 4 T4: no layout fits: the smallest (")
    assert refused[1].startswith("not on 8 T4 with ethernet-25: no layout fits: the smallest (")
    assert all("can be filled;" in line for line in refused)
    Path("hardware").mkdir()
    Path("hardware/box.toml").write_text(BOX)
    out = shoal.said("compare run.yaml --on h100,our-box --devices 4,8")
    assert "unknown" in out
    assert "the catalogue knows none of our-box; give one with --price" in out
    assert "the fastest is 8 H100 SXM" in out
    given = shoal.json("compare run.yaml --on h100,our-box --devices 4,8 --price 2,0.5")
    for row in given["rows"]:
        hours = row["days"]["expected"] * 24 * row["devices"]
        assert row["usd"]["expected"] == pytest.approx(hours * {"H100 SXM": 2.0, "our-box": 0.5}[row["device"]])


BOX = """\
[[device]]
name = "our-box"
peak.bf16 = 362
memory_gb = 48
bandwidth_tbs = 0.86
link.gbs = 31
link.domain = 4
scale_out = { fabric = "our-net" }

[[fabric]]
name = "our-net"
gbs = 3
per = "node"
latency_us = 20
achievable = 0.8
"""


def test_a_machine_and_a_network_of_ones_own_are_planned_for(shoal: Shoal) -> None:
    Path("hardware").mkdir()
    Path("hardware/box.toml").write_text(BOX)
    found = shoal.json("run.yaml --on our-box --devices 8")
    assert (found["device"], found["fabric"]) == ("our-box", "our-net")
    assert found["layouts"][0]["usd"] is None
    faster = shoal.json("run.yaml --on our-box --devices 8 --fabric ib-ndr")
    assert faster["layouts"][0]["step_s"] < found["layouts"][0]["step_s"]


def test_islands_are_planned_with_what_they_trade_and_how_they_come_back(shoal: Shoal) -> None:
    words = "run.yaml --on h100 --devices 32 fleet.islands=4"
    out = shoal.said(words)
    assert "on 32 H100 SXM (8 a node, ib-ndr between nodes), 4 islands of 8" in out
    assert "Islands: of 16 shards of a batch each computes its part; then a device sends" in out
    assert "by TCP from the host's memory over ib-ndr" in out
    assert "With fleet.islands 1: +" in out
    found, alone = shoal.json(words), shoal.json("run.yaml --on h100 --devices 32")
    best = found["layouts"][0]
    mesh = best["mesh"]
    assert mesh["pp"] * mesh["dp_shard"] * mesh["cp"] * mesh["tp"] == 8
    assert mesh["dp_replicate"] == 1
    assert sum(best["parts_s"].values()) == pytest.approx(best["step_s"])
    # Float32 gradients, an eighth on each device, three quarters of them there and three quarters of the sum.
    assert best["sent_between_islands_bytes_a_device"] == pytest.approx(2 * 3 / 4 * 4 * 1.236e9 / 8, rel=0.02)
    assert best["parts_s"]["islands"] > 0
    assert best["step_s"] > alone["layouts"][0]["step_s"]
    supervised = shoal.json(f"{words} --style supervised --rates 50")
    islands = shoal.json(f"{words} --rates 50")
    assert islands["layouts"][0]["goodput"]["expected"] > supervised["layouts"][0]["goodput"]["expected"]


def test_the_run_file_says_what_to_plan_for_and_options_win(shoal: Shoal, tmp_path: Path) -> None:
    section = "plan: {on: h200, devices: 16, fabric: ethernet, price: 2.5, rates: 1.5, style: remote}\n"
    (tmp_path / "told.yaml").write_text(RUN + section)
    found = shoal.json("told.yaml")
    assert (found["device"], found["devices"], found["fabric"]) == ("H200", 16, "ethernet-100")
    usd, days = (found["layouts"][0][name]["expected"] for name in ("usd", "days"))
    assert usd == pytest.approx(days * 24 * 16 * 2.5)
    same = shoal.json("run.yaml --on h200 --devices 16 --fabric ethernet --price 2.5 --rates 1.5 --style remote")
    assert same["layouts"] == found["layouts"]
    other = shoal.json("told.yaml --on h100 --devices 8 --style supervised --price 1")
    assert (other["device"], other["devices"]) == ("H100 SXM", 8)
    assert other["layouts"][0]["goodput"]["expected"] > found["layouts"][0]["goodput"]["expected"]


def test_a_processor_is_planned_in_float32_and_shared_by_its_processes(shoal: Shoal) -> None:
    small = "run.yaml --on cpu model.preset=tiny model.vocab_size=512 data.seq_len=128 train.batch=8"
    one, two = (shoal.json(f"{small} --devices {n}") for n in (1, 2))
    assert (one["precision"], two["precision"]) == ("fp32", "fp32")
    assert two["layouts"][0]["tokens_s"]["expected"] < 1.05 * one["layouts"][0]["tokens_s"]["expected"]
    assert "1 process of this CPU" in shoal.said(f"{small} --devices 1")
    wide = shoal.json("run.yaml --on h100 train.precision=fp32")
    assert wide["precision"] == "fp32"
    assert wide["layouts"][0]["step_s"] > 3 * shoal.json("run.yaml --on h100")["layouts"][0]["step_s"]


def test_goodput_has_a_row_for_each_style_and_a_column_for_each_number_of_devices(shoal: Shoal) -> None:
    out = shoal.said("goodput run.yaml --on h100 --rates meta-rsc-1 model.preset=llama3-70b")
    for part in ("1,024", "16,384", "131,072", "manual", "supervised", "islands (16)", "a failure every"):
        assert part in out
    rows = shoal.json("goodput run.yaml --on h100 --rates meta-rsc-1 model.preset=llama3-70b")["rows"]
    assert len(rows) == 15
    left = {(row["style"], row["devices"]): row["goodput"] for row in rows}
    for style in ("manual", "remote", "supervised", "islands"):
        falls = [left[style, n]["expected"] for n in (1024, 16_384, 131_072)]
        assert falls == sorted(falls, reverse=True)
    many = {style: left[style, 131_072]["expected"] for style in ("remote", "supervised", "spares", "islands")}
    assert list(many) == sorted(many, key=lambda style: many[style])
    assert left["remote", 16_384]["low"] < 0.9 < left["supervised", 16_384]["high"]
    few = shoal.json("goodput run.yaml --on h100 --devices 64 --style islands,spares")["rows"]
    assert [row["goodput"] is None for row in few] == [True, False]


@pytest.mark.parametrize(
    ("words", "published"),
    [
        ("--peers 14 --mbit 2000 --latency-ms 60 --loss 0 --step-s 22.8 --inner-steps 100 --compression int8 "
         "--exchange ring model.preset=llama3-8b", 0.957),  # INTELLECT-1 in the USA, 10.2B parameters
        ("--peers 17 --mbit 880/4000 --achieved --step-s 40 --inner-steps 30 --compression top-k --exchange store "
         "model.preset=llama3-70b", 0.945),  # Covenant-72B
    ],
)  # fmt: skip
def test_a_swarm_is_as_busy_as_published(shoal: Shoal, words: str, published: float) -> None:
    (row,) = shoal.json(f"swarm run.yaml {words}")["rows"]
    assert row["busy"]["expected"] == pytest.approx(published, abs=0.015)
    assert row["busy"]["low"] <= row["busy"]["expected"] <= row["busy"]["high"]


def test_a_swarm_has_a_table_over_rounds_and_compression(shoal: Shoal) -> None:
    words = "swarm run.yaml --on a100 --devices 1 train.batch=8"
    out = shoal.said(words)
    assert "8 peers, 100 Mbit/s up and 100 down, 100 ms, 0.001 of packets lost" in out
    assert "every 10 steps" in out
    assert "every 500 steps" in out
    assert "Top-k every 10 steps makes" in out
    found = shoal.json(words)
    assert len(found["rows"]) == 7 * 4
    assert found["step_s"]["low"] < found["step_s"]["expected"] < found["step_s"]["high"]
    busy = {(row["compression"], row["inner_steps"]): row["busy"]["expected"] for row in found["rows"]}
    assert busy["bf16", 10] < busy["int8", 10] < busy["top-k", 10] < busy["top-k", 100] < 1
    hidden = shoal.json(f"{words} --overlap")["rows"]
    assert all(
        after["busy"]["expected"] >= row["busy"]["expected"] for after, row in zip(hidden, found["rows"], strict=True)
    )


def test_validate_prints_errors_by_source_by_machine_and_overall(shoal: Shoal, tmp_path: Path) -> None:
    layouts = [{"tp": n, "tokens_s_gpu": 8000 - 300 * n} for n in (1, 2, 4, 8)]
    table(tmp_path / "runs.csv", *layouts, {"tp": 1, "recompute": "full", "tokens_s_gpu": 6000}, {"layers": None})
    out = shoal.said("validate runs.csv")
    assert out.startswith("6 rows, 5 of them predicted\n  refused 1: the model's layers is not stated\n")
    for title in ("by source", "by machine", "overall", "somebody", "H100-SXM-80GB", "all rows"):
        assert title in out
    assert "Order in groups of 5 or more runs of one model on one machine (1 of them):" in out
    assert "Order in groups where nothing but the layout differs (1 of them):" in out
    found = shoal.json("validate runs.csv")
    assert found["overall"]["speed"]["rows"] == 5
    assert found["layouts"][0]["spearman"] > 0.5


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("run.yaml --on h900", 2, "there is no accelerator 'h900' in the catalogue; the nearest are"),
        ("run.yaml --on h100 --fabric foo", 2, "there is no fabric 'foo' in the catalogue; known are ib, roce, efa"),
        ("run.yaml --on h100 --fabric string", 2, "there is no fabric 'string' in the catalogue; the nearest"),
        ("run.yaml --on h100 --style hope", 2, "there is no restart style 'hope'; use one of manual, remote"),
        ("run.yaml --on h100 --rates never", 2, "there is no failure rate 'never'; use one of default, meta-rsc-1"),
        ("run.yaml --on h100 --devices 0", 2, "--devices 0: 0 is not a whole number of devices, 1 or more"),
        ("run.yaml --on h100 --devices few", 2, "few is not a whole number of devices"),
        ("run.yaml --on h100 --devices 8,16", 2, "`shoal plan compare` takes several"),
        ("run.yaml --on h100,h200", 2, "--on h100,h200: a plan is for one of them"),
        ("run.yaml --on h100 --price -1", 2, "-1 is not dollars for one device and hour, more than 0"),
        ("run.yaml --on h100 --top 0", 2, "--top 0: at least one layout has to be shown"),
        ("run.yaml --on h100 --chart a.png", 2, "--chart is an option of `shoal plan compare RUN.yaml`"),
        ("run.yaml --on h100 --devices 7 train.batch=8 mesh.pp=1", 2, "no layout of 7 devices can train this run"),
        ("run.yaml --on h100 --devices 1 mesh.reduce=micro_batch", 2, "mesh.reduce micro_batch is for FSDP without a"),
        ("run.yaml --on t4 --devices 1 model.preset=llama3-70b", 78, "no layout fits: the smallest (one device"),
        ("run.yaml --on h100 --devices 64 --style islands", 2, "64 devices are not enough for 16 islands"),
        ("run.yaml --on h100 --devices 10 fleet.islands=4", 2, "10 devices cannot be shared out to the 4 islands"),
        ("run.yaml --on h100 fleet.islands=3", 2, "no layout of 8 devices an island can train this run"),
        ("run.yaml --on h100 --peers 8", 2, "--peers is an option of `shoal plan swarm RUN.yaml`"),
        ("run.yaml plan.on=h900", 2, "plan.on of the run file: there is no accelerator 'h900'"),
        ("run.yaml plan.on=h100 plan.fabric=foo", 2, "plan.fabric of the run file: there is no fabric 'foo'"),
        ("run.yaml plan.on=h100 plan.rates=never", 2, "plan.rates of the run file: there is no failure rate 'never'"),
        ("run.yaml plan.on=h100 plan.style=hope", 2, "plan.style is 'hope', but must be `manual`, `remote`"),
        ("run.yaml --on h100 --rates -1", 2, "--rates -1: give failures of hardware in 1,000 device-days"),
        ("goodput run.yaml", 2, "name the devices, as in `shoal plan goodput RUN.yaml --on h100`"),
        ("goodput run.yaml --on h100 --style hope", 2, "there is no restart style 'hope'"),
        ("swarm", 2, "one file is needed: `shoal plan swarm RUN.yaml`"),
        ("goodputt run.yaml", 2, "there is no `shoal plan goodputt`; did you mean `shoal plan goodput run.yaml`?"),
        ("run.yaml --on h100 --devices 2 fleet.islands=4", 2, "the 4 islands of fleet.islands; take 4."),
        ("swarm run.yaml --step-s 1 --peers 0", 2, "--peers 0: at least one peer has to train"),
        ("swarm run.yaml --step-s 1 --mbit fast", 2, "--mbit fast: give Mbit/s, as in 100, or UP/DOWN"),
        ("swarm run.yaml --step-s 1 --loss 200%", 2, "--loss 200%: give a share, as in 0.1% or 0.001"),
        ("swarm run.yaml --step-s 1 --inner-steps 0", 2, "--inner-steps 0: give whole numbers of steps"),
        ("swarm run.yaml --step-s 1 --compression topk2", 2, "--compression topk2: did you mean top-k? There are bf16"),
        ("swarm run.yaml --step-s 1 --exchange pigeon", 2, "--exchange pigeon: there are all_gather, store"),
        ("swarm run.yaml --step-s 1 --exchange ring --compression top-k", 2, "cannot be added on their way"),
        ("swarm run.yaml --step-s 0", 2, "--step-s 0: a step takes more than 0 seconds"),
        (
            "run.yaml --on h100 model.preset=tiny data.seq_len=512",
            2,
            "set model.vocab_size, as in `shoal plan RUN.yaml model.vocab_size=128256`",
        ),
        ("nowhere.yaml --on h100", 2, "there is no run file nowhere.yaml"),
        ("run.yaml other.yaml", 2, "one file is needed: `shoal plan RUN.yaml`"),
        ("compare", 2, "one file is needed: `shoal plan compare RUN.yaml`"),
        ("compare run.yaml", 2, "name the machines to compare, as in `shoal plan compare RUN.yaml --on h100,b200`"),
        ("compare run.yaml --on h100,b200,a100 --price 1,2", 2, "give one price, or one for each of the 3 of --on"),
        ("compare run.yaml --on h100 --chart a.pdf", 2, "give the file a name that ends in .png"),
        ("compare run.yaml --on h100,h900", 2, "there is no accelerator 'h900'"),
        ("validate", 2, "one file is needed: `shoal plan validate CASES.csv`"),
        ("validate nowhere.csv", 2, "nowhere.csv cannot be read: No such file"),
        ("validate run.yaml", 2, "run.yaml: the column gpu_type is missing"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(shoal: Shoal, words: str, code: int, says: str) -> None:
    got, out, err = shoal(words)
    assert (got, out) == (code, "")
    assert err.startswith("shoal: ")
    assert says in err
    assert err.count("\n") == 1
    assert "defect" not in err


def test_where_nothing_fits_compare_says_so_and_fails(shoal: Shoal) -> None:
    code, out, _ = shoal("compare run.yaml --on t4,l4 --devices 1 model.preset=llama3.1-405b train.batch=4")
    assert code == 78
    assert out.count("no layout fits") == 2
