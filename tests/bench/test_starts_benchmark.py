"""The measuring behind benchmarks/starts.py: losses by place in a document are those of the model itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from shoal.model.decoder import Decoder
from shoal.spec.model import Model
from shoal.spec.shape import shape_of

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import starts  # noqa: E402

START, END = 8, 9


def test_the_loss_by_place_is_that_of_each_document_by_itself() -> None:
    model = Decoder(shape_of(Model(vocab_size=64, dim=16, layers=1, heads=2, ffn_dim=24, max_seq_len=32)))
    model.init_weights(0)
    documents = [[1, 2, 3], [4], [5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 1, 2]]
    places = {"first": (1, 1), "2 to 8": (2, 8), "2 on": (2, None)}
    for start, begins in ((START, [START]), (None, [])):
        wanted: dict[str, list[float]] = {name: [] for name in places}
        for document in documents:
            row = torch.tensor([*begins, *document, END])[:11]  # windows of 10
            with torch.no_grad():
                loss = F.cross_entropy(model(row[None, :-1])[0], row[1:], reduction="none").tolist()
            for place, one in enumerate(loss, 1 if begins else 2):
                for name, (first, last) in places.items():
                    if first <= place <= (last or 100):
                        wanted[name].append(one)
        found = starts.by_place(model, documents, places, start, END, seq=10)
        for name, values in wanted.items():
            assert found[name] == pytest.approx(sum(values) / len(values) if values else 0, abs=1e-5), name


def test_documents_are_docstrings_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whale = "a whale swims in the deep sea, and nobody knows where"
    source = f'"""{whale}"""\ndef f():\n    """{whale} {{}}"""\nclass A:\n    """short"""\n'
    monkeypatch.setattr(starts, "_sources", lambda: iter([source, source, "not python ("]))
    assert list(starts.docstrings(1)) == [whale, whale + " {}"]


@pytest.mark.slow
def test_the_benchmark_runs_small(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "starts.py", "--tiny", "--seeds", "1"]
    done = subprocess.run([*command, "--out", tmp_path / "out.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "new / old" in done.stdout
