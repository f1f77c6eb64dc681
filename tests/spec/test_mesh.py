"""A mesh that cannot be is refused, and what is suggested in its place can be."""

from __future__ import annotations

import itertools
import math
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from time import process_time

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.errors import SpecError
from shoal.spec import load
from shoal.spec.mesh import Layout, Sizes, divisors
from shoal.spec.mesh.refusal import refusal
from shoal.spec.mesh.rules import AXES, Work, broken
from shoal.spec.mesh.search import closed, nearest
from shoal.spec.model import Model
from shoal.spec.run import Mesh, Run
from shoal.spec.write import dump

NAMES = (*AXES, "ep", "micro_batch", "schedule", "cp_method")
SIZE = st.one_of(st.just("auto"), st.integers(1, 6))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Small shapes with awkward numbers, and meshes of which most are wrong."""
    kv_heads = draw(st.integers(1, 6))
    heads = kv_heads * draw(st.integers(1, 3))
    model = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 8,
        "dim": draw(st.sampled_from([16, 24, 30])),
        "ffn_dim": draw(st.sampled_from([12, 30, 64])),
        "layers": draw(st.integers(1, 9)),
        "vocab_size": draw(st.sampled_from(["auto", 60, 97, 128])),
        "rope_scaling": draw(st.sampled_from([None, None, {"kind": "dynamic", "factor": 2}])),
        "experts": draw(st.sampled_from([None, {"count": 6, "top_k": 2, "ffn_dim": 10, "shared": 1}])),
    }
    mesh = {name: draw(SIZE) for name in (*AXES, "ep", "micro_batch")}
    mesh["schedule"] = draw(st.sampled_from(["auto", "auto", "gpipe", "1f1b", "interleaved", "zbv"]))
    mesh["cp_method"] = draw(st.sampled_from(["auto", "auto", "ring", "all_to_all"]))
    return Run.model_validate(
        {
            "name": "a",
            "model": model,
            "data": {"train": "/x", "seq_len": draw(st.sampled_from([8, 24, 48, 50]))},
            "train": {"steps": 1, "batch": draw(st.integers(1, 36))},
            "mesh": mesh,
            "resources": {"processes": draw(st.one_of(st.just("auto"), st.integers(1, 24)))},
        }
    )


@settings(max_examples=100, deadline=None)
@given(runs())
def test_the_nearest_mesh_breaks_no_rule_and_is_the_mesh_itself_when_that_works(run: Run) -> None:
    work = Work.of(run)
    found = nearest(run.mesh, work)
    if work.processes is not None and found.sizes.world != work.processes:
        assert found.sizes.world < work.processes
        work = replace(work, processes=found.sizes.world)
    assert broken(found, work) == []
    layout = closed(run.mesh, Work.of(run))
    if layout is not None:
        assert kept(layout, run.mesh) == kept(found, run.mesh) == stated(run.mesh)


@settings(max_examples=100, deadline=None)
@given(runs())
def test_a_mesh_is_closed_or_refused_and_what_is_closed_keeps_every_name(run: Run) -> None:
    work = Work.of(run)
    layout, refused = closed(run.mesh, work), refusal(run.mesh, work)
    assert (layout is None) == (refused is not None)
    if layout is not None:
        assert kept(layout, run.mesh) == stated(run.mesh)
        assert broken(layout, work) == []


@settings(max_examples=30, deadline=None)
@given(runs())
def test_what_a_refusal_suggests_is_taken_when_typed(run: Run) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(dump(run))
        try:
            load(file)
        except SpecError as e:
            said = str(e)
        else:
            assume(False)
        assert said.count("\n") == 0
        load(file, typed(said, run.mesh))
        if batch := re.search(r"train\.batch (\d+) would do", said):
            load(file, [f"train.batch={batch[1]}"])
        if processes := re.search(r"resources\.processes (\d+)(?: or (\d+))? would do", said):
            for number in filter(None, processes.groups()):
                load(file, [f"resources.processes={number}"])


def typed(sentence: str, mesh: Mesh) -> list[str]:
    """The overrides that a person reads off the sentence: an axis that is not named in it is 1."""
    suggestion = re.search(
        r"the nearest (?:mesh that works|that does) (?:is|has) (.+?)(?:, on (\d+) processes)?\.$", sentence
    )
    assert suggestion, sentence
    if suggestion[1] == "one process":
        ones = [f"mesh.{name}={'auto' if name in NAMES[6:] else 1}" for name in NAMES]
        return [*ones, "resources.processes=1"]
    named = dict(part.split(" ") for part in re.split(r" x | with | and ", suggestion[1]))
    if set(named) & set(AXES):
        named = {**{name: "1" for name in AXES if getattr(mesh, name) != "auto"}, **named}
    processes = [f"resources.processes={suggestion[2]}"] if suggestion[2] else []
    return [*(f"mesh.{name}={value}" for name, value in named.items()), *processes]


def test_nothing_nearer_works_than_what_is_called_nearest() -> None:
    """Against every mesh of eight processes, one by one."""
    run = Run(name="a", data={"train": "/x", "seq_len": 64}, train={"steps": 1, "batch": 8}, model={"kv_heads": 2})
    work = replace(Work.of(run), processes=8)
    for asked in ({"tp": 4}, {"tp": 8}, {"pp": 8}, {"pp": 3, "tp": 2}, {"dp_shard": 3}, {"cp": 5}, {"pp": 4, "cp": 4}):
        mesh = Mesh(**{**dict.fromkeys(AXES, 1), **asked})
        found = nearest(mesh, work).sizes
        for sizes in itertools.product(divisors(8), repeat=5):
            other = Sizes(*sizes)
            for method, schedule in itertools.product(("ring", "all_to_all"), ("gpipe", "1f1b")):
                layout = Layout(other, 1, schedule if other.pp > 1 else "auto", method)
                if broken(layout, work) == []:
                    assert distance(found, mesh) <= distance(other, mesh) * 1.4 + 1e-9, (asked, found, other)


def distance(sizes: Sizes, mesh: Mesh) -> float:
    return sum(abs(math.log2(getattr(sizes, name)) - math.log2(int(getattr(mesh, name)))) for name in AXES)


def test_a_large_cluster_is_searched_in_seconds() -> None:
    model = {"dim": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "vocab_size": 128256}
    run = Run(name="a", data={"train": "/x", "seq_len": 4096}, train={"steps": 1, "batch": 2048}, model=model)
    mesh = Mesh(pp=12, dp_replicate=8, dp_shard=16, cp=3, tp=16, micro_batch=3, schedule="zbv", cp_method="all_to_all")
    start = process_time()
    for processes in (None, 16384, 16383, 10**6):
        work = replace(Work.of(run), processes=processes)
        found = nearest(mesh, work)
        assert broken(found, replace(work, processes=found.sizes.world)) == []
    assert process_time() - start < 15  # of this process, measured 1


def test_ranks_are_numbered_with_the_axes_that_talk_most_next_to_each_other() -> None:
    sizes = Sizes(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)
    at = [sizes.coordinate(rank) for rank in range(sizes.world)]
    assert len({tuple(a.items()) for a in at}) == sizes.world == 48
    assert [a["tp"] for a in at[:4]] == [0, 1, 0, 1]
    assert [a["cp"] for a in at[:4]] == [0, 0, 1, 1]
    assert at[24] == {"pp": 1, "dp": 0, "cp": 0, "tp": 0}


def test_experts_that_their_processes_cannot_cut_evenly_are_refused() -> None:
    experts = {"count": 8, "top_k": 2, "ffn_dim": 10}
    run = Run(name="a", data={"train": "/x"}, train={"steps": 1, "batch": 9}, model={"dim": 128, "experts": experts})
    layout = Layout(Sizes(dp_shard=9, ep=1))
    assert [text for _, text in broken(layout, Work.of(run))] == [
        "the 9 processes that mesh.ep 1 leaves to share 8 experts divide neither their number nor "
        "model.experts.ffn_dim 10 nor model.dim 128"
    ]
    wide = Model(dim=128, experts={**experts, "ffn_dim": 18})
    assert broken(layout, Work.of(run.model_copy(update={"model": wide}))) == []


def kept(layout: Layout, mesh: Mesh) -> dict[str, object]:
    every = {**{name: getattr(layout.sizes, name) for name in NAMES[:6]}}
    every |= {name: getattr(layout, name) for name in NAMES[6:]}
    return {name: every[name] for name in stated(mesh)}


def stated(mesh: Mesh) -> dict[str, object]:
    return {name: getattr(mesh, name) for name in NAMES if getattr(mesh, name) != "auto"}
