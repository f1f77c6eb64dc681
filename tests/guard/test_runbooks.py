"""Every class of failure has a page that says what you see, what Shoal did and what you do, and the table has them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.guard.hang import Hang, Other
from shoal.guard.symptoms import SAID
from shoal.islands.member import SILENT
from shoal.observe.causes import CAUSES
from shoal.observe.follow import sentence

RUNBOOKS = Path(__file__).resolve().parents[2] / "docs" / "runbooks"
PAGES = sorted(path.stem for path in RUNBOOKS.glob("*.md") if path.stem != "README")


@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_every_class_has_a_page(cause: str) -> None:
    assert cause in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_you_see_what_shoal_did_and_what_you_do(page: str) -> None:
    text = (RUNBOOKS / f"{page}.md").read_text()
    assert text.startswith(f"# {page}: ")
    for heading in ("What you see", "What Shoal did", "What to do"):
        assert text.count(f"**{heading}.**") == 1, heading


def test_the_table_lists_exactly_the_pages_there_are() -> None:
    listed = re.findall(r"^\| \[([a-z-]+)\]\(([a-z-]+)\.md\) \|", (RUNBOOKS / "README.md").read_text(), re.MULTILINE)
    assert all(name == file for name, file in listed)
    assert sorted(name for name, _ in listed) == PAGES


@pytest.mark.parametrize("cause", ["device-memory", "disk-full", "hang", "hardware", "host-memory", "network"])
def test_what_a_page_quotes_from_a_log_is_taken_for_its_class(cause: str) -> None:
    seen = (RUNBOOKS / f"{cause}.md").read_text().split("**What you see.**")[1].split("**What Shoal did.**")[0]
    seen = re.sub(r"```.*?```", "", seen, flags=re.DOTALL)
    taken_for = [found for quoted in re.findall(r"`([^`]+)`", seen) for found, words in SAID if words.search(quoted)]
    assert taken_for
    assert set(taken_for) == {cause}


HANG = Hang(
    rank=1,
    pid=4711,
    step=38,
    phase="data",
    seconds=7.2,
    stopped=False,
    why="it has made less progress than all others",
    stack=("shoal/data/feed.py:121 assemble",),
    reader=(),
    others=(Other(0, "backward", "backward at shoal/parallel/laid.py:88"),),
)
SLOW = replace(
    HANG,
    phase="forward",
    seconds=21.0,
    stack=("shoal/model/attention.py:61 forward",),
    others=(Other(0, "backward", "backward at shoal/parallel/laid.py:81"),),
    works=True,
)
KILLED = {"kind": "failure", "cause": "killed", "evidence": "ended by SIGKILL"}
SLOWER = {"kind": "straggler"}
TOLD: list[tuple[str, dict[str, Any]]] = [
    ("runbooks/hang", {"kind": "failure", "rank": 1, "cause": "hang", "evidence": HANG.evidence}),
    ("guide/failures", {"kind": "slow", "rank": 1, "evidence": SLOW.evidence}),
    ("runbooks/numerics", {"kind": "skip", "step": 812, "batch": 811, "loss": "nan", "grad_norm": "nan"}),
    ("runbooks/preempted", {"kind": "stopping", "signal": "SIGTERM"}),
    ("runbooks/straggler", {**SLOWER, "rank": 3, "phase": "data", "own_s": 0.42, "usual_s": 0.1, "by": "host"}),
    ("runbooks/straggler", {**SLOWER, "rank": 5, "phase": "compute", "own_s": 0.31, "usual_s": 0.18, "by": "device"}),
    ("guide/failures", {**KILLED, "rank": 1, "action": "restart 1 of 3 from step 50 in 1 s"}),
    ("guide/islands", {**KILLED, "rank": 0, "island": 2, "action": "restart island 2 in 1 s; the others go on"}),
    ("guide/islands", {"kind": "epoch", "step": 42, "left": {"2": "closed its connection"}, "members": [0, 1]}),
    ("guide/islands", {"kind": "epoch", "step": 65, "joined": [2], "members": [0, 1, 2]}),
]


@pytest.mark.parametrize(("page", "record"), TOLD, ids=lambda x: x if isinstance(x, str) else x["kind"])
def test_what_a_page_says_that_you_see_is_what_you_see(page: str, record: dict[str, Any]) -> None:
    said = sentence(record, "demo")
    assert said is not None
    assert said.split(" skipped: ")[0] in (RUNBOOKS.parent / f"{page}.md").read_text()


def test_the_guide_names_the_reasons_for_which_an_island_is_gone() -> None:
    text = (RUNBOOKS.parent / "guide" / "islands.md").read_text()
    assert f"`{SILENT}`" in text
    assert all(f"`{why}" in text for why in ("closed its connection", "does not answer", "has another life", "left"))
