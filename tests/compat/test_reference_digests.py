"""Every driver computes what it computed when the reference was kept, to the last bit: each loss, each gradient norm
and the final weights of a short run.

A change that is meant to change bits keeps new ones: `python -m tests.compat.bits`, and says why in its commit.
"""

from __future__ import annotations

import warnings

import pytest

from tests.compat.bits import TOLERANCE, Kept, Row, computed, difference, here, near

SLOW = ("plain tp 2", "plain pp 2")  # a driver that other rows go through; 2 s of CPU time each
KEPT = Kept.read()
QUICK = [name for name in KEPT.rows if name not in SLOW]


@pytest.fixture(scope="module")
def quick() -> dict[str, Row]:
    return computed(QUICK)


@pytest.fixture(scope="module")
def slow() -> dict[str, Row]:
    return computed(SLOW)


def check(name: str, found: Row) -> None:
    """Bit for bit; on another processor or with another torch within a tolerance, which is said."""
    parted = difference(KEPT.rows[name], found)
    if parted is None:
        return
    how = f"'{name}' differs from what was kept at {KEPT.commit[:12]}: {parted}"
    assert here() != KEPT.made_on, f"{how}. If that is meant: `python -m tests.compat.bits` keeps the new bits."
    where = f"{how}. It was kept on {KEPT.made_on} and this is {here()}"
    assert near(KEPT.rows[name], found), f"{where}; that explains a last bit, and not more than {TOLERANCE:g}."
    warnings.warn(f"{where}; losses and norms are within {TOLERANCE:g}, so only that was tested.", stacklevel=2)


@pytest.mark.parametrize("name", QUICK)
def test_the_driver_gives_the_bits_that_were_kept(name: str, quick: dict[str, Row]) -> None:
    check(name, quick[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_mesh_gives_the_bits_that_were_kept(name: str, slow: dict[str, Row]) -> None:
    check(name, slow[name])


def test_what_was_kept_is_of_every_row() -> None:
    from tests.compat.drivers import ROWS

    assert list(KEPT.rows) == list(ROWS)


def test_one_peer_of_a_swarm_takes_the_plain_steps_until_its_first_round_ends(quick: dict[str, Row]) -> None:
    from tests.compat.drivers import ROUND

    plain, swarm = quick["plain"], quick["swarm, one peer"]
    assert swarm["norms"][:ROUND] == plain["norms"][:ROUND]
    assert swarm["losses"][:ROUND] == plain["losses"][:ROUND]
    assert swarm["norms"][ROUND] != plain["norms"][ROUND]  # its part came back through the codec


def test_one_stage_is_the_plain_run_to_the_bit_and_two_are_but_for_the_sum_of_norms(quick: dict[str, Row]) -> None:
    plain, one, two = (quick[name] for name in ("plain", "stages, one", "stages, two"))
    assert one == plain
    assert (two["losses"], two["digest"]) == (plain["losses"], plain["digest"])
    assert near(two, plain)


def test_a_difference_is_found_and_named() -> None:
    row = KEPT.rows["plain"]
    last = [*row["norms"][:-1], (float.fromhex(row["norms"][-1]) * (1 + 2**-50)).hex()]
    assert "gradient norm of step 6" in str(difference(row, {**row, "norms": last}))
    assert near(row, {**row, "norms": last})
    assert "final weights" in str(difference(row, {**row, "digest": "0"}))
    assert "5 steps instead of 6" in str(difference(row, {**row, "losses": row["losses"][:-1]}))
    assert not near(row, {**row, "losses": [(float.fromhex(x) * (1 + 2e-6)).hex() for x in row["losses"]]})


def test_another_processor_is_said_and_more_than_rounding_fails_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    row = KEPT.rows["plain"]
    nearly = {**row, "norms": [(float.fromhex(x) * (1 + 1e-9)).hex() for x in row["norms"]]}
    far = {**row, "norms": [(float.fromhex(x) * 1.01).hex() for x in row["norms"]]}
    monkeypatch.setattr("tests.compat.test_reference_digests.here", lambda: KEPT.made_on)
    with pytest.raises(AssertionError, match="keeps the new bits"):
        check("plain", nearly)
    monkeypatch.setattr("tests.compat.test_reference_digests.here", lambda: {"processor": "other"})
    with pytest.warns(UserWarning, match="only that was tested"):
        check("plain", nearly)
    with pytest.raises(AssertionError, match="not more than"):
        check("plain", far)
