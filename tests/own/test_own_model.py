"""A whole model of somebody's own: one curve on every layout, the same bits after a stop, one sentence a mistake."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import checkpoint
from shoal.cli.main import main
from shoal.errors import WRONG_USAGE, ShoalError, SpecError, Stopped
from shoal.journal import journal
from shoal.journal.rundir import RunDir
from shoal.spec.own_rules import closed_by_own
from shoal.spec.rules import broken
from shoal.spec.run import Run
from tests.own.test_own_code import here
from tests.train.tiny import digest_of, losses_of, make_data, make_run, steps_of, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")

# No decoder of Shoal's: learnt positions, LayerNorm, GELU, one matrix for the embedding and the head, a buffer.
CODE = """
import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, dim, drop):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.drop = nn.Dropout(drop)

    def forward(self, x, mask=None):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(x))


class Net(nn.Module):
    def __init__(self, run):
        super().__init__()
        dim, drop = 32, run.own.settings.get("drop", 0.0)
        self.embed = nn.Embedding(run.model.vocab_size, dim)
        self.places = nn.Embedding(64, dim)
        self.layers = nn.ModuleList(Layer(dim, drop) for _ in range(2))
        self.head = nn.Linear(dim, run.model.vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)

    def forward(self, tokens, positions, documents=None):
        x = (self.embed(tokens) + self.places(positions)) * self.scale
        seq = tokens.shape[1]
        mask = torch.ones(seq, seq, dtype=torch.bool, device=tokens.device).tril()
        if documents is not None:
            mask = (mask & (documents[:, :, None] == documents[:, None, :]))[:, None]
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(x)


class Deaf(Net):
    def forward(self, tokens):
        return super().forward(tokens, torch.arange(tokens.shape[1])[None].expand_as(tokens))


class Ahead(Net):
    def forward(self, tokens, positions, documents):
        return super().forward(tokens, positions, documents).roll(-1, 1)


class Shut(Deaf):
    def __init__(self, run):
        super().__init__(run)
        for layer in self.layers:
            nn.init.zeros_(layer.out.weight)


class Half(Net):
    def __init__(self, run):
        super().__init__(run)
        self.bfloat16()


class Odd(Net):
    def forward(self, tokens, positions, documents):
        return super().forward(tokens, positions, documents)[..., :5]


class Chance(Net):
    def __init__(self, run):
        import os
        super().__init__(run)
        with torch.no_grad():
            self.embed.weight += int.from_bytes(os.urandom(2), "big") / 1e6


def none(run):
    return 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own-model")
    make_data(folder / "data")
    (folder / "net.py").write_text(CODE)
    return folder


def asked(folder: Path, name: str, **changes: Any) -> Run:
    usual = {"name": name, "model": {}, "own.folder": str(folder), "own.model": "net:Net", "train.steps": 5}
    return closed_by_own(make_run(folder / "data", **{**usual, **changes}))


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunDir:
    return train_on(asked(folder, "alone"), folder, 1)


def start_of(run_dir: RunDir) -> dict[str, Any]:
    return next(r for r in journal.records(run_dir.journal_file) if r["kind"] == "start")


@pytest.mark.parametrize(
    ("name", "world", "mesh"),
    [
        ("sharded", 2, {}),  # what `auto` takes
        ("copies", 2, {"mesh.dp_replicate": 2}),
        ("both", 4, {"mesh.dp_replicate": 2, "mesh.dp_shard": 2, "mesh.recompute": "full", "mesh.micro_batch": 2}),
    ],
)
def test_it_trains_on_one_curve_whatever_the_layout(
    folder: Path, alone: RunDir, name: str, world: int, mesh: dict[str, Any]
) -> None:
    other = train_on(asked(folder, name, **mesh), folder, world)
    np.testing.assert_allclose(losses_of(other), losses_of(alone), rtol=2e-6)
    norms, wanted = ([r["grad_norm"] for r in steps_of(d)] for d in (other, alone))
    np.testing.assert_allclose(norms, wanted, rtol=2e-5)
    start = start_of(other)
    assert start["mesh"]["dp_shard"] == (1 if name == "copies" else 2)
    layer = 3 * 32 * 32 + 3 * 32 + 32 * 32 + 32 + 2 * 32 * 64 + 64 + 32 + 4 * 32
    assert start["params"] == (128 + 64) * 32 + 2 * layer


def test_it_learns_and_nothing_is_made_up_about_it(alone: RunDir) -> None:
    steps, start = steps_of(alone), start_of(alone)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    assert "flops" not in steps[0]
    assert start["peak_flops"] is None


def test_dropout_is_drawn_again_by_recomputation_and_after_a_stop(folder: Path) -> None:
    drops = {"own.settings": {"drop": 0.3}}
    whole = here(asked(folder, "drop", **drops), folder)
    again = here(asked(folder, "drop-again", **drops, **{"mesh.recompute": "full"}), folder)
    assert losses_of(whole).tolist() == losses_of(again).tolist()  # a loss hangs on the gradient of the step before it
    assert digest_of(whole) == digest_of(again)
    run, calls = asked(folder, "drop-stopped", **drops), iter(range(100))
    with pytest.raises(Stopped):
        here(run, folder, lambda: next(calls) >= 2)
    assert digest_of(here(run, folder)) == digest_of(whole)


def test_a_run_goes_on_over_another_number_of_processes(folder: Path, alone: RunDir) -> None:
    run, calls = asked(folder, "moved"), iter(range(100))
    with pytest.raises(Stopped):
        here(run, folder, lambda: next(calls) >= 3)
    moved = train_on(run, folder, 2)
    np.testing.assert_allclose(losses_of(moved), losses_of(alone), rtol=2e-6)
    found = checkpoint.open_checkpoint(moved.checkpoints, checkpoint.published(moved.checkpoints)[-1].name)
    assert "model.net.layers.1.qkv.weight" in found.manifest.tensors
    assert "model.net.head.weight" not in found.manifest.tensors  # the embedding, once


def test_what_it_learnt_can_be_looked_at_and_not_exported(
    folder: Path, alone: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--workspace", str(alone.workspace)]
    asked_for = ["sample", "alone", "--prompt", "a", "--max-tokens", "3", "--seed", "1", *at]
    assert main(asked_for) == WRONG_USAGE
    assert "is own code (net:Net): read" in capsys.readouterr().err
    assert main([*asked_for, "--own-code", "--json"]) == 0
    assert '"tokens": [' in capsys.readouterr().out
    assert main(["checkpoint", "export", "alone", str(folder / "out"), *at]) == WRONG_USAGE
    assert "the model of" in capsys.readouterr().err


WRONG = {
    "takes no documents": (
        {"own.model": "net:Deaf"},
        "does not keep documents apart, and rows of this data hold several: give its forward",
    ),
    "takes no documents, and begins with none of its attention": (
        {"own.model": "net:Shut"},
        "does not keep documents apart",
    ),
    "looks ahead": ({"own.model": "net:Ahead"}, "sees those after it, and would learn to copy them"),
    "half": ({"own.model": "net:Half"}, "is torch.bfloat16 on cpu; make it float32"),
    "other logits": ({"own.model": "net:Odd"}, r"shape \(2, 16, 5\) of tokens \(2, 16\); it must give logits"),
    "no module": ({"own.model": "net:none"}, "must be a torch.nn.Module, or make one; it made int"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_is_one_sentence(wrong: str, folder: Path) -> None:
    changes, says = WRONG[wrong]
    name = wrong.replace(" ", "-").replace(",", "")
    with pytest.raises(ShoalError, match=says) as e:
        here(asked(folder, f"wrong-{name}", **changes), folder)
    assert "\n" not in str(e.value)
    assert e.value.exit_code == WRONG_USAGE


def test_a_model_that_ignores_documents_trains_where_they_are_not_kept_apart(folder: Path) -> None:
    changes = {"own.model": "net:Deaf", "data.mask_documents": False, "train.steps": 2}
    assert len(losses_of(here(asked(folder, "deaf", **changes), folder))) == 2


def test_start_values_that_differ_between_processes_are_found(folder: Path) -> None:
    with pytest.raises(BaseException, match="starts with other numbers in other processes"):
        train_on(asked(folder, "chance", **{"own.model": "net:Chance"}), folder, 2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"dim": 64}}, "model.dim has no effect with own.model net:Net"),
        ({"model": {"preset": "llama-8b"}}, "model.preset has no effect"),
        ({"mesh.tp": 2}, "is not cut over mesh.tp"),
        ({"mesh.pp": 2}, "is not cut over mesh.pp"),
        ({"own.block": "net:Layer"}, "own.block has no effect"),
        ({"train.precision": "fp8"}, "is not computed in fp8"),
        ({"train.z_loss": 1e-4}, "write it into own.objective"),
        ({"train.optimizer": {"name": "muon"}}, "Muon may turn is not known"),
        ({"train.optimizer": {"decay_embeddings": False}}, "are embeddings is not known"),
    ],
)
def test_what_has_no_effect_is_refused(folder: Path, changes: dict[str, Any], says: str) -> None:
    assert any(says in sentence for _, sentence in broken(asked(folder, "rules", **changes)))


def test_nothing_is_planned_for_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "run.yaml"
    file.write_text(
        textwrap.dedent(f"""
            name: planned
            data: {{train: {folder / "data"}, seq_len: 32}}
            train: {{steps: 2, batch: 4}}
            own: {{model: "net:Net"}}
        """)
    )
    assert main(["plan", str(file)]) == WRONG_USAGE
    assert "computes and holds is not known, so nothing can be planned" in capsys.readouterr().err
    assert main(["show", str(file)]) == 0
    assert "those of own.model net:Net" in capsys.readouterr().out


def test_it_begins_anew_with_the_numbers_that_it_began_with(folder: Path) -> None:
    """As an island does that starts over."""
    import torch

    from shoal.model.own_model import BySignature, OwnModel, digest, maker
    from shoal.spec.shape import shape_of

    class Net(torch.nn.Module):
        def __init__(self, run: Run) -> None:
            super().__init__()
            self.blocks = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))

    run = asked(folder, "anew", model={"vocab_size": 64})
    model = OwnModel(maker(Net, run, "own.model"), shape_of(run.model), BySignature())
    before = digest(model)
    model.net.blocks(torch.ones(4, 3))  # which moves the averages of the norm
    torch.nn.init.zeros_(model.net.blocks[0].weight)
    assert digest(model) != before
    model.init_weights(run.seed)
    assert digest(model) == before


def test_a_model_is_made_by_sessions_alone(folder: Path) -> None:
    import shoal

    with pytest.raises(SpecError, match=r"`shoal\.session` makes it"):
        shoal.make_model(asked(folder, "api"))
