"""One run, every axis, one curve: the quick part of the parity matrix (`make bench` prints all of it)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.journal.rundir import RunDir
from tests.parallel.counted import assert_as_the_formula_says
from tests.train.matrix import FULL, QUICK, SLOW, Case, Matrix

pytestmark = pytest.mark.usefixtures("kept_ranks")


def small(case: Case) -> Case:
    """Four layers are for four stages; without stages the second block tells all that a fourth would, in half the
    time."""
    return case if case.mesh.get("pp", 1) > 1 else replace(case, changes={**case.changes, "model.layers": 2})


CASES = [(small(case), case in SLOW) for case in (*QUICK, *SLOW)]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    # Where they part they do so at once: a wrong gradient shows in the first norm, a wrong update in the second loss, a
    # wrong state of the optimizer in the third.
    return Matrix(tmp_path_factory.mktemp("matrix"), steps=3)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if slow else []) for case, slow in CASES]
)
def test_a_mesh_trains_on_the_curve_of_one_process_and_sends_what_the_formula_says(case: Case, matrix: Matrix) -> None:
    result = matrix.run(case)
    assert result.good, result
    # Routers decide what is sent; and the toys' attention is as wide as their feed-forward (parallel/recompute.py).
    routed = case.model == "mixture" or case.mesh.get("ep", 1) > 1
    if not routed and case.mesh.get("recompute") != "selective":
        assert_as_the_formula_says(RunDir.of(matrix.jobs(case)[1].run.name, matrix.folder), case.processes)


def test_the_whole_matrix_has_meshes_of_every_size() -> None:
    assert len({case.name for case in FULL}) >= 24
    assert {case.processes for case in FULL} == {2, 4, 8}
