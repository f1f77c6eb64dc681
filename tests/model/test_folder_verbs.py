"""What one verb refuses about a folder all refuse, with the same sentence; and what training leaves out is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from shoal.cli.main import main
from shoal.data.tokenizer import load_tokenizer
from shoal.model.decoder import Decoder
from shoal.model.hf import save_folder
from shoal.observe.follow import sentence
from shoal.readable import notes
from shoal.spec.model import Model
from shoal.spec.shape import shape_of

RUN = """\
name: tuned
model: {weights: hf}
data: {train: data, seq_len: 32}
train: {steps: 2, batch: 2, optimizer: {lr: 1e-3}}
"""
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shape = shape_of(Model(vocab_size=320, dim=16, layers=1, heads=2, ffn_dim=24, max_seq_len=64))
    model = Decoder(shape)
    model.init_weights(0)
    save_folder("hf", shape, model.state_dict(), tokenizer=load_tokenizer("byte"))
    Path("run.yaml").write_text(RUN)
    return tmp_path


def changed(**fields: Any) -> None:
    file = Path("hf/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"is_causal": False}, "is_causal False: Shoal's attention is causal"),
        ({"num_hidden_layers": 1 << 62}, "num_hidden_layers"),
        ({"rope_scaling": LLAMA3}, "high_freq_factor 1 is not above low_freq_factor 4"),
        ({"foreign": 1}, "foreign 1, a field that Shoal does not know"),
    ],
)
def test_every_verb_refuses_a_folder_with_the_same_sentence(
    fields: dict[str, Any], said: str, space: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(**fields)
    heard = []
    for verb in (
        ["show", "run.yaml"],
        ["plan", "run.yaml"],
        ["train", "run.yaml"],
        ["sample", "--weights", "hf"],
        ["checkpoint", "import", "hf", "out"],
        ["checkpoint", "import", "hf", "out", "--like", "hf"],
    ):
        assert main(verb) == 2, verb
        heard.append(capsys.readouterr().err)
    assert all(said in text for text in heard)
    assert len({text[text.index("config.json") :] for text in heard}) == 1
    assert not (space / "out").exists() or not any((space / "out").iterdir())


def test_integers_are_taken_for_weights_by_nobody(space: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = space / "hf" / "model.safetensors"
    save_file({name: (t * 100).char() for name, t in load_file(file).items()}, file)
    changed(num_hidden_layers=1)
    for verb in (["sample", "--weights", "hf"], ["checkpoint", "import", "hf", "out"]):
        assert main(verb) == 78
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_training_leaves_out_is_said_before_and_after(space: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(attention_dropout=0.1, pad_token_id=2)
    assert main(["plan", "run.yaml"]) == 0
    planned = capsys.readouterr().out
    assert "Weights: config.json has attention_dropout 0.1, and Shoal trains without dropout." in planned
    assert "pad_token_id 2, whose embedding transformers does not train" in planned
    assert main(["checkpoint", "import", "hf", "out"]) == 0
    assert "note: config.json has attention_dropout 0.1" in capsys.readouterr().err
    start = {"kind": "start", "world": 1, "device": "cpu", "params": 9, "notes": ["it has no dropout.", 7]}
    assert str(sentence(start, "x")).endswith("\nnote: it has no dropout.")
    assert notes({"notes": "no list"}) == []
