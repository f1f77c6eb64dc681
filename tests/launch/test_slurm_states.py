"""What Slurm prints, as it was recorded, in our words."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launch.test_slurm_script import request

from shoal.errors import ShoalError
from shoal.launch.backend import State
from shoal.launch.slurm.hostlist import expand
from shoal.launch.slurm.notes import Notes, file_of, read, write
from shoal.launch.slurm.reasons import waits_for
from shoal.launch.slurm.refusals import refusal
from shoal.launch.slurm.states import parse_sacct, parse_squeue, state

# squeue of Slurm 22.05.8, less the blanks that fill its fields.
SQUEUE = """\
5    |RUNNING  |None      |1 |n[1-2] |2026-11-16T02:31:14 |2027-11-16T02:31:14 |0     |
2    |PENDING  |BeginTime |1 |       |2026-11-16T02:32:24 |N/A                 |0     |
6_7  |PENDING  |Resources |0 |       |N/A                 |N/A                 |0     |
3    |COMPLETED|None      |0 |n[1-3] |2026-11-16T02:30:23 |2026-11-16T02:30:26 |0     |
8    |CANCELLED|None      |1 |n1     |2026-11-16T02:31:14 |2026-11-16T02:31:17 |15    |
9    |FAILED   |NonZeroExitCode |0 |n1 |2026-11-16T02:31:14 |2026-11-16T02:31:17 |512 |
10   |FAILED   |NonZeroExitCode |0 |n1 |2026-11-16T02:31:14 |2026-11-16T02:31:17 |36608 |
"""
# As sacct's manual shows it (--parsable2).
SACCT = """\
11|CANCELLED by 0|0:0|2026-11-16T02:31:14|2026-11-16T02:31:17|n1
12|OUT_OF_MEMORY|0:125|2026-11-16T02:31:14|2026-11-16T02:31:17|n[1-2]
13|TIMEOUT|0:0|2026-11-16T02:31:14|2026-11-16T02:31:17|n2
14|COMPLETED|0:0|2026-11-16T02:31:14|2026-11-16T02:31:17|None assigned
"""


def states(text: str = SQUEUE, noted: Notes | None = None) -> dict[str, State]:
    parse = parse_squeue if text is SQUEUE else parse_sacct
    return {said.id: state(said.id, said, noted) for said in parse(text)}


def test_what_squeue_says() -> None:
    found = states()
    assert (found["5"].phase, found["5"].nodes, found["5"].restarts) == ("running", ("n1", "n2"), 1)
    assert found["2"].why.startswith("it may not start before 2026-11-16 02:32:24; it is to be started again: ")
    assert found["6_7"].why == "not enough nodes are free for it; it starts as soon as they are"
    assert (found["3"].phase, found["3"].exit_code) == ("done", 0)
    assert (found["8"].phase, found["8"].exit_code) == ("stopped", None)
    assert (found["9"].phase, found["9"].exit_code, found["9"].why) == (
        "failed", 2, "the run file is wrong (code 2); see its log",
    )  # fmt: skip
    assert (found["10"].phase, found["10"].exit_code) == ("stopped", 143)
    noted = Notes(code=75, why="3 starts in a row made no progress", over=True)
    assert states(noted=noted)["9"].why == noted.why  # which our own script wrote


def test_what_sacct_says() -> None:
    found = states(SACCT)
    assert found["11"].why == "cancelled by root"
    assert "raise launch.memory_gb" in found["12"].why
    assert found["13"].why.startswith("its time limit was reached")
    assert (found["14"].phase, found["14"].nodes) == ("done", ())


def test_a_job_that_slurm_has_forgotten(tmp_path: Path) -> None:
    assert state("7", None, None).phase == "gone"
    write(file_of(tmp_path, "7"), Notes(code=143, why="it was told to stop", over=True, time=3.0))
    found = state("7", None, read(file_of(tmp_path, "7")))
    assert (found.phase, found.exit_code, found.ended) == ("stopped", 143, 3.0)
    file_of(tmp_path, "7").write_text("{")
    assert read(file_of(tmp_path, "7")) is None


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("Priority", "jobs of higher priority stand before it"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", r"reserved \(UnavailableNodes:n1\); `sinfo -R` says why"),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved", "down, drained or kept for jobs of higher priority"),
        ("JobHeldUser", "`scontrol release 7` lets it go"),
        ("QOSMaxJobsPerUserLimit", r"jobs at once that you may have in its QOS is reached .* another launch.priority"),
        ("QOSMaxGRESPerUser", "the limit of GPUs that you may have in its QOS"),
        ("QOSMaxWallDurationPerJobLimit", "more time than its QOS allows one job"),
        ("AssocGrpGRES", "all of its users have together in its account"),
        ("AssocGrpCPURunMinutesLimit", "cores that all of its users"),
        ("AssocMaxWallDurationPerJobLimit", "more time than its account allows one job"),
        ("launch failed requeued held", "Slurm holds it"),
        ("SomethingNew", "Slurm gives the reason SomethingNew"),
    ],
)
def test_every_reason_is_a_plain_sentence(reason: str, says: str) -> None:
    import re

    assert re.search(says, waits_for(reason, "7", None))


@pytest.mark.parametrize(
    ("said", "code", "says"),
    [
        ("sbatch: error: invalid partition specified: night\nsbatch: error: Batch job submission failed: Invalid "
         "partition name specified", 2, "no partition 'night'"),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified", 2,
         "may not charge account"),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", 2, "2 nodes of"),
        ("sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
         2, "launch.time_limit 9 h is longer"),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates "
         "accounting/QOS policy (job submit limit, user's size and/or time limits)", 75, "QOSMaxSubmitJobPerUserLimit"),
        ("sbatch: unrecognized option '--nonsense'", 2, "launch.slurm.options"),
        ("sbatch: error: Something else", 78, "Something else; `shoal launch --render`"),
    ],
)  # fmt: skip
def test_every_refusal_names_what_to_change(said: str, code: int, says: str) -> None:
    asked = request(**{"launch.queue": "night", "launch.nodes": 2, "launch.time_limit": "9 h"})
    error = refusal(said, asked)
    assert isinstance(error, ShoalError)
    assert error.exit_code == code
    assert says in str(error)


def test_node_lists_are_unfolded() -> None:
    assert expand("n[1-3,07],gpu2") == ("n1", "n2", "n3", "n07", "gpu2")
    assert expand("rack[1-2]n[09-10]") == ("rack1n09", "rack1n10", "rack2n09", "rack2n10")
    assert expand("n[1-3,0") == ()
    assert expand("") == ()


def test_only_the_nodes_of_a_job_that_is_asked_for_are_written_out() -> None:
    """squeue --me lists thousands of jobs; each list of nodes may be long."""
    others = "9|FAILED|2:0|Unknown|Unknown|n[1-99999]\n" * 1000
    assert {one.listed for one in parse_sacct(others)} == {"n[1-99999]"}
    assert len(state("9", next(iter(parse_sacct(others))), None).nodes) == 99_999
