"""Runs that an earlier Shoal wrote are listed, shown, verified, sampled and gone on with, to the same end.

They lie in tests/compat/kept, as `python -m tests.compat.make tests/compat/kept` made them at the commit that kept.json
names. They stay: where a format changes, these must still be read, and new ones are made beside them
(docs/guide/compatibility.md).
"""

from __future__ import annotations

import json
import math
import re
import tarfile
import warnings

import pytest

from tests.compat.bits import difference, here, near
from tests.compat.kept import FOLDER, MADE_AT, Row, looked_at

KEPT = json.loads((FOLDER / "kept.json").read_text())
LOOP = ("plain", "experts", "islands")
SLOW = ("torchrun",)  # its files are those of `plain`, by another hand
MOST_BYTES = 1_500_000


@pytest.fixture(scope="module")
def found() -> dict[str, Row]:
    return looked_at([name for name in KEPT["runs"] if name not in SLOW])


@pytest.fixture(scope="module")
def found_slow() -> dict[str, Row]:
    return looked_at(SLOW)


def same_end(name: str, expected: Row, row: Row) -> None:
    """Losses, norms and digest of the steps that were left; on another processor or torch within a tolerance."""
    assert row["steps"] == expected["steps"]
    parted = difference(expected, row)
    if parted is None:
        return
    how = f"the kept run '{name}' ends otherwise than at {KEPT['commit'][:12]}: {parted}"
    assert here() != KEPT["made_on"], how
    assert near(expected, row), f"{how}; it was kept on {KEPT['made_on']}, which does not explain that."
    warnings.warn(f"{how}; it was kept on {KEPT['made_on']} and this is {here()}: within tolerance.", stacklevel=2)


@pytest.mark.parametrize("name", LOOP)
def test_a_kept_run_is_listed_and_shown(name: str, found: dict[str, Row]) -> None:
    assert found[name]["ps"] == KEPT["runs"][name]["ps"]
    assert found[name]["ps"]["status"] == ("finished" if name == "experts" else "stopped")
    assert found[name]["report"] == KEPT["runs"][name]["report"]


@pytest.mark.parametrize("name", LOOP)
def test_its_checkpoints_are_verified_and_sampled(name: str, found: dict[str, Row]) -> None:
    assert found[name]["verified"]
    assert found[name]["verified"] == KEPT["runs"][name]["verified"]
    assert found[name]["sample"] == KEPT["runs"][name]["sample"]


@pytest.mark.parametrize("name", [*LOOP, "stages"])
def test_it_goes_on_to_the_same_end(name: str, found: dict[str, Row]) -> None:
    expected, row = KEPT["runs"][name]["resume"], found[name]["resume"]
    same_end(name, expected, row)
    assert row["steps"][-1] > row["steps"][0] > 1
    assert [step for step, _ in row["evals"]] == ([12] if name == "experts" else [])


def test_an_exported_folder_says_what_its_run_says(found: dict[str, Row]) -> None:
    assert found["exported"]["sample"] == found["plain"]["sample"]


def test_stages_of_before_are_shown_and_save_checkpoints_from_then_on(found: dict[str, Row]) -> None:
    """Their states were no checkpoints. Since they went on, they are, and the stages are one run when joined."""
    stages = found["stages"]
    assert stages["report"] == KEPT["runs"]["stages"]["report"]
    assert [one["good"] for one in stages["verified"]] == [True] * 3  # checkpoint.keep
    assert stages["sample"]


def test_a_kept_peer_of_a_swarm_goes_on_to_its_end(found: dict[str, Row]) -> None:
    """Its rounds are of so many seconds, and its first one after a start is slowed by the clock: no bits to compare."""
    expected, row = KEPT["runs"]["swarm"], found["swarm"]
    for key in ("ps", "report", "verified", "sample"):
        assert row[key] == expected[key]
    went_on = row["resume"]
    assert went_on["steps"][0] > expected["ps"]["step"]  # it did not begin anew
    assert went_on["steps"][-1] == expected["ps"]["total"]
    assert went_on["digest"] is not None
    assert all(math.isfinite(float.fromhex(loss)) for loss in went_on["losses"])


@pytest.mark.slow
def test_a_kept_run_of_torchrun_goes_on_to_the_same_end_by_resume(found_slow: dict[str, Row]) -> None:
    expected, row = KEPT["runs"]["torchrun"], found_slow["torchrun"]
    for key in ("ps", "report", "verified", "sample"):
        assert row[key] == expected[key]
    same_end("torchrun", expected["resume"], row["resume"])


def test_kept_runs_are_small_and_name_no_machine() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < MOST_BYTES
    paths = re.compile(rb"/(?:home|Users|root|work|mnt|opt)/[\w./-]+")
    for archive in FOLDER.glob("*.tar.xz"):
        with tarfile.open(archive) as tar:
            for member in tar:
                assert member.isfile()
                file = tar.extractfile(member)
                assert file is not None
                text = file.read().replace(str(MADE_AT).encode(), b"")
                assert not paths.search(text), f"{archive.name}: {member.name}"
                hosts = set(re.findall(rb'"host(?:name)?": ?"([^"]+)"', text))
                assert {host.split()[0] for host in hosts} <= {b"somewhere", b"127.0.0.1"}, f"{archive.name}: {member}"
