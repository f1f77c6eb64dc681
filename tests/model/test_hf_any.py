"""Any causal model of transformers (`model.hf`): the same losses and gradient norms on every layout, in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.cli.main import main
from shoal.decide.auto import decide
from shoal.errors import WRONG_ENVIRONMENT, WRONG_USAGE, SpecError
from shoal.model.foreign import made
from shoal.model.hf_any import Hf, make_net, save_folder
from shoal.model.seen import seen
from shoal.own.code import NONE
from shoal.parallel.build import build
from shoal.parallel.place import join
from shoal.spec import load
from shoal.spec.run import Run
from shoal.spec.shape import shape_of
from tests.model.hf_kinds import APART, CAPPED, KINDS, write_config
from tests.model.hf_layouts import Measured, asked, found
from tests.train.tiny import digest_of, losses_of, make_data, train_on


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers  # noqa: F401  # once, before ranks are forked

    folder = tmp_path_factory.mktemp("any")
    make_data(folder / "data")
    for kind in KINDS:
        write_config(folder / kind, kind)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["dp_shard 2", pytest.param("dp_shard 4", marks=pytest.mark.slow)])
def test_it_trains_on_one_curve_whatever_the_layout(kind: str, layout: str, folder: Path) -> None:
    alone, shared = (found(folder, name, tuple(KINDS))[kind] for name in ("1", layout))
    assert isinstance(alone, Measured)
    assert isinstance(shared, Measured)
    np.testing.assert_allclose(shared.losses, alone.losses, rtol=1e-5)
    np.testing.assert_allclose(shared.norms, alone.norms, rtol=1e-5)
    assert shared.by_dp_shard.parameters == shared.parameters > 10
    assert alone.by_dp_shard.parameters == 0
    assert alone.losses[0] > alone.losses[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_its_class_does_is_found_by_trying(kind: str, folder: Path) -> None:
    run = asked(folder, kind)
    model = made(run, shape_of(run.model), NONE)
    saw = seen(model, 16)
    assert saw.before == (kind not in APART)
    assert not saw.after
    way = model.way
    assert isinstance(way, Hf)
    assert way._plain_head == (kind not in CAPPED)
    # Its own loss of the same rows, by its own logits.
    tokens = torch.arange(24).reshape(2, 12) % 96
    targets = torch.roll(tokens, -1, 1)
    targets[0, 3] = -100
    with torch.no_grad():
        logits = make_same(run)(input_ids=tokens, use_cache=False).logits
        wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        assert float(model(tokens, targets=targets)) == pytest.approx(float(wanted), rel=1e-6)


def make_same(run: Run) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        return make_net(run)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exported_is_read_by_transformers_to_the_bit(kind: str, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = asked(folder, kind)
    model = made(run, shape_of(run.model), NONE)
    lasting = {n: b for n, b in model.named_buffers() if n in model.state_dict()}
    with torch.no_grad():
        for p in model.parameters():
            p += 0.01 * torch.randn_like(p)
    save_folder(tmp_path / "out", run, model.shape, {**dict(model.named_parameters()), **lasting}, None, None, None)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    mine, theirs = dict(model.net.named_parameters()), dict(read.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("kind", ["gemma3_text", "deepseek_v3"])
def test_weights_go_in_and_come_out_to_the_bit(kind: str, folder: Path, tmp_path: Path) -> None:
    """Started from a folder, trained over two processes, resumed, exported: transformers reads what was learnt."""
    from transformers import AutoModelForCausalLM

    start = make_same(asked(folder, kind, "start", "seed=5"))
    start.save_pretrained(tmp_path / "start")  # type: ignore[operator]
    file = asked(folder, kind, kind, f"model.hf={tmp_path / 'start'}", apart=True)
    run_dir = train_on(file, tmp_path, 2)
    fresh = train_on(asked(folder, kind, f"{kind}-fresh", apart=True), tmp_path, 1)
    assert abs(losses_of(run_dir)[0] - losses_of(fresh)[0]) > 1e-4  # the weights were the folder's
    out = tmp_path / "out"
    assert main(["checkpoint", "export", kind, str(out), "--tokenizer", "none", "--workspace", str(tmp_path)]) == 0
    read = AutoModelForCausalLM.from_pretrained(out)
    assert json.loads((out / "config.json").read_text())["model_type"] == kind
    from shoal import checkpoint

    saved = checkpoint.newest(run_dir.checkpoints)
    assert saved is not None
    learnt = checkpoint.read_full(saved)
    mine = dict(read.named_parameters())
    assert {f"net.{name}" for name in mine} <= learnt.keys()
    assert all(torch.equal(p, learnt[f"net.{name}"]) for name, p in mine.items())
    # The run needs the folder no more.
    (tmp_path / "start" / "config.json").unlink()
    assert load(run_dir.spec_file).run.model.hf_config == file.model.hf_config
    assert digest_of(run_dir)


def test_what_cannot_be_trained_so_is_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(name: str, config: dict[str, Any], says: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        with pytest.raises(SpecError, match=says) as e:
            load_of(tmp_path / name)
        assert "\n" not in str(e.value)

    def load_of(where: Path) -> Run:
        return asked(folder, str(where), "wrong")

    refused("code", {"model_type": "llama", "auto_map": {"A": "b"}}, "has auto_map, which names code of its own")
    refused("quantized", {"model_type": "llama", "quantization_config": {"a": 1}}, "describes quantized weights")
    refused("no-type", {"vocab_size": 5}, "has no model_type")
    refused("no-words", {"model_type": "mamba2"}, "vocab_size")
    refused("huge", {"model_type": "mamba2", "vocab_size": -3}, "vocab_size")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "nonesuch", "vocab_size": 96}')
    unknown = load_of(tmp_path / "unknown")
    with pytest.raises(SpecError, match="makes no causal model of"):
        make_net(unknown)
    run = decide(asked(folder, "mamba2", apart=True), folder, 1).run
    with pytest.raises(SpecError, match="does not keep documents apart, and rows of this data hold several: set data"):
        build(run, join(run), several=True)
    file = folder / "missing.yaml"
    file.write_text("name: m\nmodel: {hf: nowhere}\ndata: {train: data}\ntrain: {steps: 2, batch: 4}\n")
    assert main(["train", str(file), "--workspace", str(tmp_path)]) == WRONG_ENVIRONMENT
    assert "nowhere" in capsys.readouterr().err
    file.write_text("name: m\nmodel: {hf: phi3, dim: 64}\ndata: {train: data}\ntrain: {steps: 2, batch: 4}\n")
    assert main(["train", str(file), "--workspace", str(tmp_path)]) == WRONG_USAGE
    assert "model.dim has no effect with model.hf" in capsys.readouterr().err
    file.write_text("name: m\nmodel: {hf: phi3}\ndata: {train: data, seq_len: 32}\ntrain: {steps: 2, batch: 4}\n")
    assert main(["show", str(file)]) == 0
    said = capsys.readouterr().out
    assert "model.vocab_size" in said
    assert not any(name in said for name in ("model.dim", "model.hf_config"))
