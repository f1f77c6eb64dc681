"""What packed documents leave of attention, counted as the kernel does it, and what that does to a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.cli.main import main
from shoal.data.documents import documents_of
from shoal.data.sources import open_sources
from shoal.data.windows import Windows
from shoal.model.documents import mask
from shoal.plan.documents import BLOCK, WHOLE, Documents, of_mean, of_windows, one_document
from shoal.plan.search import priced
from shoal.spec.flops import seen_pairs
from shoal.spec.mesh import Layout, Sizes
from shoal.spec.shape import Shape, shape_of
from tests.plan.asked import asked
from tests.train.tiny import make_data, make_run

SEQ = 1000  # no whole number of blocks


def shape(**changes: Any) -> Shape:
    return shape_of(make_run(Path("data"), **{"model.vocab_size": 64, **changes}).model)


def lengths(rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
    cuts = np.sort(rng.choice(np.arange(1, SEQ), int(rng.integers(0, 12)), replace=False))
    return np.diff(np.concatenate([[0], cuts, [SEQ]]))


@pytest.mark.parametrize("window", [None, 2, 100, 129, 300])
def test_computed_blocks_are_those_that_the_kernel_is_given(window: int | None) -> None:
    of = shape(**({} if window is None else {"model.sliding_window": window}))
    rng = np.random.default_rng(3)
    for _ in range(20):
        one = lengths(rng)
        numbers = torch.from_numpy(np.arange(len(one)).repeat(one).astype(np.int32))[None]
        blocks = mask(numbers, SEQ, window, torch.device("cpu"))
        assert not isinstance(blocks, torch.Tensor)
        assert blocks is not None
        assert blocks.full_kv_num_blocks is not None
        given = int(blocks.kv_num_blocks.sum() + blocks.full_kv_num_blocks.sum())
        found = of_windows(of, [one], "")
        assert found.computed == pytest.approx(given * BLOCK**2 / SEQ)
        assert found.seen == pytest.approx(seen_pairs(of, one) / of.layers / SEQ)
        assert found.seen < found.computed


def test_a_mean_length_becomes_what_exponential_lengths_give() -> None:
    """A token of a stream of such documents has as many before it as a document has on average, as far as the window
    reaches back."""
    for mean, seq in ((500, 131_072), (2000, 8192)):
        found = of_mean(shape(), mean, seq)
        expected = mean * (1 - mean / seq * (1 - np.exp(-seq / mean)))
        assert found.seen == pytest.approx(expected, rel=0.05)
        assert "assumed" in found.basis


def test_prepared_data_is_looked_at_and_nothing_else_is_guessed(tmp_path: Path) -> None:
    run = make_run(make_data(tmp_path / "data"), **{"model.vocab_size": 96})
    of = shape_of(run.model)
    found = documents_of(run, of, tmp_path)
    windows = Windows(open_sources(run.data.train, run.data, tmp_path), 32, mask_documents=True)
    assert windows.sizes[0] > 64  # so that some are picked
    every = windows.batch(np.zeros(windows.sizes[0]), np.arange(windows.sizes[0]))
    assert found.seen == pytest.approx(seen_pairs(of, every.lengths) / of.layers / every.tokens.size, rel=0.1)
    assert found.basis == "64 windows of the data"
    apart = make_run(tmp_path / "data", **{"data.mask_documents": False, "model.vocab_size": 96})
    for other in (apart, make_run(tmp_path / "not-there", **{"model.vocab_size": 96})):
        assert documents_of(other, of, tmp_path) == one_document(of, 32)


def test_long_windows_of_short_documents_are_planned_as_short_windows_are() -> None:
    """On an H200, 128k tokens a window: as one document the step is six times that of documents of 1,000 tokens, which
    takes what windows of 1,000 tokens take, but for blocks at their edges."""
    long, short = (asked("llama3.2-1b", 1, batch, "h200", seq) for seq, batch in ((131_072, 2), (1024, 256)))
    packed = replace(long, documents=of_mean(long.shape, 1000, 131_072))
    times = {}
    for name, which, micro in (("one", long, 1), ("packed", packed, 1), ("short", short, 128)):
        times[name] = priced(which, Layout(Sizes(), micro), "attention").seconds
    assert times["one"] / times["packed"] > 3
    assert times["packed"] == pytest.approx(times["short"], rel=0.1)


def test_where_a_mask_tells_documents_apart_nothing_is_skipped() -> None:
    long = asked("llama3.2-1b", 1, 2, "h200", 32_768)
    known = Documents(500.0, 600.0, "told")
    assert replace(long, documents=known).computed == 600.0
    plain = long.run.model_copy(update={"train": long.run.train.model_copy(update={"kernels": "plain"})})
    assert replace(long, run=plain, documents=known).computed is None


def test_a_shared_sequence_computes_whole_windows() -> None:
    long = asked("llama3.2-1b", 8, 8, "h100", 32_768)
    packed = replace(long, documents=of_mean(long.shape, 500, 32_768))
    alone, shared = Layout(Sizes(dp_shard=8), 1), Layout(Sizes(dp_shard=4, cp=2), 1, "auto", "ring")
    for layout, less in ((alone, True), (shared, False)):
        one, many = (priced(which, layout, "attention").parts["attention"] for which in (long, packed))
        assert (many < one / 5) if less else (many == pytest.approx(one))


def test_the_plan_says_how_it_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_data(tmp_path / "data")
    file = tmp_path / "run.yaml"
    model = "{dim: 256, layers: 2, heads: 4, vocab_size: 128}"
    file.write_text(
        f"name: packed\nmodel: {model}\ndata: {{train: {data}, seq_len: 256}}\ntrain: {{steps: 10, batch: 8}}\n"
    )
    asking = ["plan", str(file), "--on", "h200", "--devices", "1", "--workspace", str(tmp_path)]
    assert main(asking) == 0
    assert "tokens on average (15 windows of the data), not a window's 128; the kernel computes" in (
        capsys.readouterr().out
    )
    assert main([*asking, "--json", f"data.train={tmp_path / 'nowhere'}"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["documents"]["basis"] == WHOLE
