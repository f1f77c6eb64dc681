"""The feed: each rank gets its share of every step, whatever the world was before; opening the sources of a run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.feed import Feed
from shoal.data.order import Order
from shoal.data.shards import ShardWriter, TokenShards, write_index
from shoal.data.sources import open_sources
from shoal.data.windows import Batch, Windows
from shoal.errors import DataError, SpecError
from shoal.spec.run import Data, Source
from tests.data.reading import make_documents, write_data_set
from tests.patience import limit

LENGTH = 4


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Windows:
    """Windows that say which they are: window w begins with the token w * LENGTH."""
    folder = tmp_path_factory.mktemp("counted")
    writer = ShardWriter(folder, "shard-00000", "uint16")
    writer.add(np.arange(97 * LENGTH + 1))
    write_index(folder, [writer.close()], vocab_size=60_000, eos_id=97 * LENGTH, tokenizer="byte")
    return Windows([TokenShards.open(folder)], LENGTH, True)


def read_by(windows: Windows, order: Order, batch: int, world: int, t: int) -> list[int]:
    """The windows that all ranks of a world read in step t, in the order of their ranks."""
    seen: list[int] = []
    for rank in range(world):
        with Feed(windows, order, batch, rank, world, micro_batch=2) as feed:
            seen += [int(b) // LENGTH for micro in feed.assemble(t) for b in micro.tokens[:, 0]]
    return seen


@settings(max_examples=40, deadline=None)
@given(
    schedule=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 6)), min_size=1, max_size=6),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_schedule_of_world_sizes_reads_each_sample_exactly_once(counted: Windows, schedule, seed: int) -> None:
    """A run that grows and shrinks reads the positions one after the other: each epoch every window once."""
    batch, order = 12, Order(counted.sizes, [1.0], seed)
    seen: list[int] = []
    t = 0
    for world, steps in schedule:
        for _ in range(steps):
            seen += read_by(counted, order, batch, world, t)
            t += 1
    n = counted.sizes[0]
    for epoch in range(0, len(seen), n):
        part = Counter(seen[epoch : epoch + n])
        assert max(part.values()) == 1
    assert seen == order.at(0, t * batch)[1].tolist()


def same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(one, other, strict=True)
        for name in ("tokens", "targets", "positions", "documents")
    )


def test_steps_read_ahead_equal_steps_assembled_on_the_spot_in_any_sequence(counted: Windows) -> None:
    with Feed(counted, Order(counted.sizes, [1.0], 3), 12, rank=1, world=2, micro_batch=4) as feed:
        for t in [0, 1, 2, 10**9, 10**9 + 1, 0, 1, 1, 5]:
            batches = feed.step(t)
            assert [len(b.tokens) for b in batches] == [4, 2]
            assert same(batches, feed.assemble(t)), t


def test_the_next_step_is_made_while_this_one_computes(counted: Windows) -> None:
    feed = Feed(counted, Order(counted.sizes, [1.0], 3), 12)
    made: dict[int, threading.Event] = {t: threading.Event() for t in range(8)}
    original = feed.assemble

    def watched(t: int) -> list[Batch]:
        time.sleep(0.3)
        result = original(t)
        made[t].set()
        return result

    feed.assemble = watched  # type: ignore[method-assign]  # the real one, with a clock
    feed.step(0)
    assert feed.wait_s > 0.25
    assert made[1].wait(limit(5))  # without anybody asking for step 1
    feed.step(1)
    assert feed.wait_s < limit(0.25)
    feed.close()


def test_an_error_while_reading_ahead_is_raised_by_the_step_it_belongs_to(tmp_path: Path) -> None:
    data = write_data_set(tmp_path, [make_documents(40, seed) for seed in range(2)])
    windows = Windows([data], 8, True)
    with Feed(windows, Order(windows.sizes, [1.0], 0), windows.sizes[0]) as feed:
        (tmp_path / "shard-00001.tokens").write_bytes(b"")
        with pytest.raises(DataError, match=r"shard-00001\.tokens is shorter"):
            feed.step(0)
        with pytest.raises(DataError, match=r"shard-00001\.tokens is shorter"):
            feed.step(0)


def test_a_closed_feed_leaves_no_thread_and_says_so(counted: Windows) -> None:
    before = threading.active_count()
    feed = Feed(counted, Order(counted.sizes, [1.0], 0), 12)
    feed.step(0)
    feed.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        feed.step(7)


def test_a_batch_that_cannot_be_shared_equally_is_refused(counted: Windows) -> None:
    with pytest.raises(SpecError, match=r"train\.batch 10 cannot be shared equally by 4 processes; take 8 or 12"):
        Feed(counted, Order(counted.sizes, [1.0], 0), 10, 0, 4)


# The sources of a run.


def data_spec(*paths: str | Path) -> Data:
    return Data(train=tuple(Source(path=str(p)) for p in paths))


def test_remote_sources_are_cached_in_the_workspace(tmp_path: Path) -> None:
    local = write_data_set(tmp_path / "prose", [make_documents(5)])
    spec = data_spec(f"file://{tmp_path}/prose", tmp_path / "prose")
    remote, _ = open_sources(spec.train, spec, tmp_path / "workspace")
    assert remote.read(0, 10)[0].tolist() == local.read(0, 10)[0].tolist()
    assert any(p.is_file() for p in (tmp_path / "workspace" / ".shoal" / "cache").glob("*/*"))


def tokenizer(text: str, **settings: object) -> str:
    return json.dumps({"model": {"type": "BPE", "vocab": {text: 0}}, "truncation": None, **settings})


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ({}, {"vocab_size": 300}, "vocabularies of 257 and 300 tokens"),
        ({}, {"tokenizer": "tokenizer.json"}, "tokenizers 'byte' and 'tokenizer.json'"),
        (
            {"tokenizer": "tokenizer.json", "content": tokenizer("a")},
            {"tokenizer": "tokenizer.json", "content": tokenizer("b")},
            "different tokenizers of the same size",
        ),
    ],
)
def test_a_mixture_of_different_tokenizers_is_refused(tmp_path: Path, first, second, says: str) -> None:
    for name, options in (("first", dict(first)), ("second", dict(second))):
        content = options.pop("content", None)
        write_data_set(tmp_path / name, [make_documents(5)], **options)
        if content:
            (tmp_path / name / "tokenizer.json").write_text(content)
    spec = data_spec(tmp_path / "first", tmp_path / "second")
    with pytest.raises(DataError, match=rf"first and .*second have {says}"):
        open_sources(spec.train, spec, tmp_path)


def test_tokenizers_that_differ_only_in_settings_that_change_no_ids_may_be_mixed(tmp_path: Path) -> None:
    for name, text in (("a", tokenizer("x")), ("b", tokenizer("x", truncation={"max_length": 512}))):
        write_data_set(tmp_path / name, [make_documents(5)], tokenizer="tokenizer.json")
        (tmp_path / name / "tokenizer.json").write_text(text)
    spec = data_spec(tmp_path / "a", tmp_path / "b")
    assert len(open_sources(spec.train, spec, tmp_path)) == 2


def test_reading_data_does_not_import_torch() -> None:
    """The supervisor and the planner look at data sets too, and start in a fraction of a second."""
    code = (
        "import sys, shoal.data.feed, shoal.data.sources, shoal.data.remote; "
        "sys.exit('torch' in sys.modules or 'obstore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
