"""Training on packed prompts and answers: padding weighs nothing, tokens are counted, and old runs stay chopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.data.order import Order
from shoal.data.shards import TokenShards
from shoal.data.windows import PADDING, Batch, Windows
from shoal.model.decoder import Decoder
from shoal.spec import load
from shoal.spec.shape import shape_of
from shoal.train.state import State
from tests.train.tiny import VOCAB, digest_of, make_data, make_run, steps_of, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), masked=True)


@pytest.fixture(scope="module")
def decoder(data: Path) -> Decoder:
    made = Decoder(shape_of(make_run(data).model, VOCAB))
    made.init_weights(0)
    return made


def loss_and_gradients(decoder: Decoder, *batches: Batch) -> tuple[float, list[torch.Tensor]]:
    decoder.zero_grad()
    total = 0.0
    for b in batches:
        tokens, positions, documents, targets = map(torch.from_numpy, (b.tokens, b.positions, b.documents, b.targets))
        loss = decoder(tokens, positions, documents, targets)
        loss.backward()
        total += float(loss.detach())
    return total, [p.grad.clone() for p in decoder.parameters() if p.grad is not None]


def padded(data: Path) -> Batch:
    windows = Windows([TokenShards.open(data)], 64, True, "pairs")
    batch = windows.batch(np.zeros(windows.sizes[0], np.int64), np.arange(windows.sizes[0]))
    padding, second = (batch.documents == PADDING).any(1), (batch.documents == 1).any(1)
    rows = [*np.flatnonzero(padding & second)[:3], *np.flatnonzero(padding & ~second)[:2]]
    assert len(rows) == 5
    return Batch(**{name: getattr(batch, name)[rows] for name in Batch.__annotations__})


def test_what_stands_in_the_padding_changes_no_bit(data: Path, decoder: Decoder) -> None:
    batch = padded(data)
    other = np.where(batch.documents == PADDING, (batch.tokens + 7) % VOCAB, batch.tokens)
    loss, gradients = loss_and_gradients(decoder, batch)
    again, others = loss_and_gradients(decoder, replace(batch, tokens=other))
    assert again == loss
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def test_a_packed_window_learns_what_its_documents_teach_one_by_one(data: Path, decoder: Decoder) -> None:
    batch = padded(data)
    alone = []
    for row in range(len(batch.tokens)):
        for number in range(int(batch.documents[row][batch.documents[row] != PADDING].max()) + 1):
            mine = batch.documents[row] == number
            parts = {name: getattr(batch, name)[row][mine][None] for name in Batch.__annotations__}
            alone.append(Batch(**{**parts, "documents": np.zeros_like(parts["documents"])}))
    assert len(alone) > len(batch.tokens)
    assert sum(one.target_count for one in alone) == batch.target_count
    loss, gradients = loss_and_gradients(decoder, batch)
    apart, others = loss_and_gradients(decoder, *alone)
    assert loss == pytest.approx(apart, rel=1e-5)
    for a, b in zip(gradients, others, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


def test_padding_is_not_counted(data: Path, tmp_path: Path) -> None:
    run = make_run(data, **{"train.steps": 3, "train.batch": 8, "data.seq_len": 64})
    counted = steps_of(train_on(run, tmp_path, 1))
    windows = Windows.of([TokenShards.open(data)], run.data)
    order = Order(windows.sizes, [1.0], run.seed)
    for t, record in enumerate(counted):
        batch = windows.batch(*order.at(8 * t, 8))
        real = batch.documents != PADDING
        assert record["tokens"] == np.count_nonzero(real) < batch.tokens.size
        assert record["targets"] == np.count_nonzero(batch.targets != -100)


def test_a_run_begun_before_there_was_packing_goes_on_chopped(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its resolved file nor its checkpoint names the key; what it reads, and its bits, do not change."""
    changes = {"data.seq_len": 64, "data.packing": "chop", "train.steps": 6, "checkpoint.every": 3}
    whole = train_on(make_run(data, **{**changes, "name": "whole"}), tmp_path, 1)
    best = train_on(make_run(data, **{**changes, "name": "best", "data.packing": "best-fit"}), tmp_path, 1)
    assert digest_of(best) != digest_of(whole)

    def of_then(self: State, step: int) -> dict[str, object]:
        found = extra(self, step)
        del found["spec"]["data"]["packing"]
        return found

    extra = State.extra
    calls = iter([False] * 4 + [True])
    with monkeypatch.context() as patch:
        patch.setattr(State, "extra", of_then)
        run = make_run(data, **{**changes, "name": "old"})
        with pytest.raises(AssertionError, match="stopped after step 4"):
            train_on(run, tmp_path, 1, lambda: next(calls))
    spec_file = tmp_path / "runs" / "old" / whole.spec_file.name
    lines = spec_file.read_text().splitlines()
    spec_file.write_text("\n".join(line for line in lines if not line.strip().startswith("packing:")))
    manifest = json.dumps([json.loads(f.read_text()) for f in (tmp_path / "runs" / "old").rglob("manifest.json")])
    assert '"mask_documents"' in manifest
    assert '"packing"' not in manifest
    loaded = load(spec_file)
    assert (loaded.run.data.packing, loaded.origins["data.packing"]) == ("chop", "before data.packing")
    resumed = train_on(loaded.run, tmp_path, 1)
    assert [r["step"] for r in steps_of(resumed)] == [1, 2, 3, 4, 5, 6]
    assert digest_of(resumed) == digest_of(whole)
