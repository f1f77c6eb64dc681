"""The table of what a step sent: compact, in order, and not there when there is nothing to say."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.journal.journal import Journal
from shoal.journal.rundir import RunDir
from shoal.observe import traffic
from shoal.observe.report import as_json, as_text, report

FIELDS = ("axis", "op", "group", "calls", "bytes", "most_calls", "most_bytes")
ROWS = [
    dict(zip(FIELDS, row, strict=True))
    for row in (
        ("all", "all_reduce", 4, 12, 216, 3, 54),
        ("pp", "send", 2, 12, 6 << 20, 4, 2 << 20),
        ("shard", "all_gather", 2, 20, 1 << 34, 5, 1 << 32),
    )
]
RECORD = {"kind": "traffic", "step": 3, "world": 4, "rows": ROWS}


def test_the_table_shows_the_mean_of_a_process_and_the_busiest_one() -> None:
    assert traffic.lines([RECORD]) == [
        "communication in step 3: 4.0 GiB a process",
        "  axis   of  operation   calls    bytes  busiest process",
        "  pp      2  send            4  1.5 MiB          2.0 MiB",
        "  shard   2  all_gather      5  4.0 GiB          4.0 GiB",
        "  all     4  all_reduce      3     54 B             54 B",
    ]


def test_the_newest_counted_step_is_shown_and_nothing_when_there_is_none() -> None:
    later = {**RECORD, "step": 500}
    alone = {**RECORD, "step": 501, "rows": []}
    assert traffic.lines([RECORD, later, alone])[0].startswith("communication in step 500")
    assert traffic.lines([]) == []
    assert traffic.lines([alone]) == []


def test_an_axis_that_the_table_does_not_know_comes_last() -> None:
    odd = {**ROWS[0], "axis": "mesh_new"}
    assert traffic.lines([{**RECORD, "rows": [odd, *ROWS]}])[-1].split()[0] == "mesh_new"


def test_the_report_has_it_as_text_and_as_json(tmp_path: Path) -> None:
    run_dir = RunDir.of("demo", tmp_path)
    run_dir.path.mkdir(parents=True)
    journal = Journal(run_dir.journal_file)
    journal.append("start", attempt=0, step=0, world=4, total=9, params=1, precision="fp32", device="cpu", mesh={})
    journal.append("traffic", **{key: value for key, value in RECORD.items() if key != "kind"}, attempt=0)
    found = report(run_dir, pictures=False)
    assert "\n".join(traffic.lines([RECORD])) in as_text(found)
    told = json.loads(json.dumps(as_json(found)))["traffic"]
    assert (told["step"], told["world"], told["rows"]) == (3, 4, ROWS)
