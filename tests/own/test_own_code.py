"""Own code in a run: the same curve on every layout, the same bits after a stop, and one sentence for each mistake."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import checkpoint
from shoal.decide.auto import decide
from shoal.errors import ShoalError, SpecError, Stopped
from shoal.journal import journal
from shoal.journal.rundir import RunDir
from shoal.leaving import own_place
from shoal.own.carry import carry
from shoal.own.code import load as load_code
from shoal.own.files import files_of
from shoal.parallel.place import join
from shoal.spec import dump
from shoal.spec.run import Run
from shoal.train.session import Session
from shoal.train.worker import work
from tests.slow import some_slow
from tests.train.tiny import digest_of, losses_of, make_data, make_run, steps_of, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")

EXAMPLE = Path(__file__).parents[2] / "examples" / "own" / "mine.py"
ALL = {
    "own.block": "mine:Block",
    "own.objective": "mine:Loss",
    "own.schedule": "mine:schedule",
    "own.optimizer": "mine:lion",
    "own.hooks": ["mine:Norms"],
    "own.settings": {"price": 0.01},
    "train.schedule": {},
    "train.steps": 6,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    make_data(folder / "data")
    shutil.copy(EXAMPLE, folder / "mine.py")
    return folder


def asked(folder: Path, name: str, **changes: Any) -> Run:
    return make_run(folder / "data", **{"name": name, "own.folder": str(folder), **changes})


def metrics_of(run_dir: RunDir) -> list[dict[str, float]]:
    return [r["values"] for r in journal.records(run_dir.journal_file) if r["kind"] == "metrics"]


def here(run: Run, workspace: Path, stop: Callable[[], bool] = lambda: False, code: str = "") -> RunDir:
    """In this process."""
    decided = decide(run, workspace, 1).run
    run_dir = RunDir.of(run.name, workspace)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    run_dir.spec_file.write_text(dump(decided))
    if code:
        (workspace / f"{run.name}.py").write_text(textwrap.dedent(code))
    carry(decided, run_dir)
    work(run_dir, decided, join(decided), stop)
    return run_dir


def of_code(tmp_path: Path, code: str, **changes: Any) -> RunDir:
    """A run of two steps with a module of its own."""
    make_data(tmp_path / "data", documents=40)
    (tmp_path / "ours.py").write_text(textwrap.dedent(code))
    run = make_run(tmp_path / "data", **{"train.steps": 2, "own.folder": str(tmp_path), **changes})
    return here(run, tmp_path)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80
    assert len((EXAMPLE.parent / "loop.py").read_text().split("if __name__")[0].strip().splitlines()) <= 15


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunDir:
    return train_on(asked(folder, "alone", **ALL), folder, 1)


@pytest.mark.parametrize(
    ("world", "mesh"),
    [(2, {"mesh.dp_shard": 2}), (4, {"mesh.dp_replicate": 2, "mesh.dp_shard": 2}), (2, {"mesh.pp": 2})],
    ids=["dp_shard 2", "4 processes", "pp 2"],
)
def test_own_code_trains_on_one_curve_whatever_the_layout(
    folder: Path, alone: RunDir, world: int, mesh: dict[str, Any]
) -> None:
    other = train_on(asked(folder, f"w{world}{next(iter(mesh))[5:]}", **ALL, **mesh), folder, world)
    np.testing.assert_allclose(losses_of(other), losses_of(alone), rtol=2e-6)
    norms, wanted = ([r["grad_norm"] for r in steps_of(d)] for d in (other, alone))
    np.testing.assert_allclose(norms, wanted, rtol=2e-5)
    for mine, theirs in zip(metrics_of(other), metrics_of(alone), strict=True):
        assert mine.keys() == theirs.keys()
        assert len(mine) == 3
        np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=2e-5)


def test_a_run_with_own_code_that_was_stopped_ends_with_the_same_bits(folder: Path, alone: RunDir) -> None:
    run, calls = asked(folder, "stopped", **ALL), iter(range(100))
    with pytest.raises(Stopped):
        here(run, folder, lambda: next(calls) >= 3)
    again = here(run, folder)
    assert {r["resumed_from"] for r in journal.records(again.journal_file) if r["kind"] == "start"} == {None, 3}
    assert digest_of(again) == digest_of(alone)
    assert metrics_of(again) == metrics_of(alone)  # also the largest norm so far, which the hook remembers


CUT = [(1, {}), (2, {"mesh.tp": 2}), (2, {"mesh.pp": 2}), (2, {"mesh.cp": 2, "mesh.dp_shard": 1})]


@pytest.mark.parametrize(("world", "mesh"), some_slow(CUT, slow=CUT[2:]))
def test_cross_entropy_of_ones_own_is_shoals(folder: Path, world: int, mesh: dict[str, Any]) -> None:
    (folder / "plain.py").write_text(
        "import torch.nn.functional as F\n"
        "def loss(logits, targets):\n"
        "    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction='sum')\n"
        "loss.per_token = True\n"
    )
    name = f"ce{world}{''.join(mesh)[5:7]}"
    changes = {"train.steps": 4, "data.mask_documents": False, **mesh}
    mine = train_on(asked(folder, name, **changes, **{"own.objective": "plain:loss"}), folder, world)
    theirs = train_on(make_run(folder / "data", name=f"{name}t", **changes), folder, world)
    np.testing.assert_allclose(losses_of(mine), losses_of(theirs), rtol=1e-6)
    norms, wanted = ([r["grad_norm"] for r in steps_of(d)] for d in (mine, theirs))
    np.testing.assert_allclose(norms, wanted, rtol=1e-5)


def test_a_loss_may_be_divided_by_something_else_than_targets(tmp_path: Path) -> None:
    code = """
        import shoal, torch.nn.functional as F
        class ByRow(shoal.Objective):
            def __init__(self, run): pass
            def loss(self, logits, targets):
                return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
            def count(self, batch): return len(batch.tokens)
    """
    by_row = steps_of(of_code(tmp_path, code, **{"own.objective": "ours:ByRow"}))[0]
    usual = steps_of(here(make_run(tmp_path / "data", name="usual", **{"train.steps": 1}), tmp_path))[0]
    assert by_row["targets"] == 16
    assert by_row["loss"] * 16 == pytest.approx(usual["loss"] * usual["targets"], rel=1e-6)


@pytest.mark.parametrize("kind", some_slow(["NAdam", "SGD", "Adagrad"], slow=["SGD", "Adagrad"]))
def test_an_optimizer_of_torchs_goes_on_with_the_same_bits(folder: Path, kind: str) -> None:
    """NAdam keeps a product that begins at 1, so a state that one step was tried on would not do."""
    more = ", momentum=0.9, dampening=0.5" if kind == "SGD" else ""
    (folder / f"o{kind}.py").write_text(
        f"import torch\ndef make(named, run):\n    return torch.optim.{kind}([p for _, p in named], lr=1e-2{more})\n"
    )
    changes = {"train.steps": 4, "own.optimizer": f"o{kind}:make"}
    whole, calls = here(asked(folder, f"{kind}-whole", **changes), folder), iter(range(100))
    run = asked(folder, f"{kind}-parts", **changes)
    with pytest.raises(Stopped):
        here(run, folder, lambda: next(calls) >= 2)
    assert digest_of(here(run, folder)) == digest_of(whole)


UNUSED = """
    import shoal, torch
    class B(shoal.Block):
        starts = {"idle": torch.ones_like}
        def __init__(self, shape, layer):
            super().__init__(shape, layer)
            self.idle = torch.nn.Parameter(torch.empty(3))
    def make(named, run):
        return torch.optim.NAdam([p for _, p in named], lr=1e-2)
"""


def test_a_parameter_that_nothing_uses_is_no_reason_not_to_resume(folder: Path) -> None:
    (folder / "unused.py").write_text(textwrap.dedent(UNUSED))
    changes = {"train.steps": 4, "own.block": "unused:B", "own.optimizer": "unused:make"}
    whole, calls = here(asked(folder, "unused-whole", **changes), folder), iter(range(100))
    run = asked(folder, "unused-parts", **changes)
    with pytest.raises(Stopped):
        here(run, folder, lambda: next(calls) >= 2)
    assert digest_of(here(run, folder)) == digest_of(whole)


def test_an_optimizer_of_ones_own_starts_as_if_nobody_had_tried_it(tmp_path: Path) -> None:
    import torch

    code = "import torch\ndef make(named, run):\n    return torch.optim.NAdam([p for _, p in named], lr=1e-2)\n"
    seen: list[Any] = []
    real = torch.optim.NAdam.step

    def step(self: Any, *args: Any) -> Any:
        seen.append({k: float(v) for k, v in next(iter(self.state.values()), {}).items() if v.numel() == 1})
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.NAdam, "step", step)
        of_code(tmp_path, code, **{"own.optimizer": "ours:make"})
    assert seen[:2] == [{}, {}]
    assert seen[2]["step"] == 1


WRONG = {
    "no such object": ("x = 1", {"own.objective": "ours:los"}, "has no `los`"),
    "not callable": ("loss = 1", {"own.objective": "ours:loss"}, "is int, not a class or a function"),
    "does not import": ("\nx = 1 / 0", {"own.objective": "ours:loss"}, "ours.py:2: ZeroDivisionError"),
    "a mean per token": (
        "def loss(logits, targets): return logits.mean(-1)",
        {"own.objective": "ours:loss"},
        "it must give one number",
    ),
    "no gradient": (
        "def loss(logits, targets): return logits.detach().sum()",
        {"own.objective": "ours:loss"},
        "without a gradient",
    ),
    "count": (
        "import shoal\nclass Loss(shoal.Objective):\n  def __init__(self, run): pass\n"
        "  def loss(self, logits, targets): return logits.sum()\n  def count(self, batch): return 0.5",
        {"own.objective": "ours:Loss"},
        "counts 0.5; it must be a whole number",
    ),
    "no optimizer": ("def make(named, run): return 3", {"own.optimizer": "ours:make"}, "gave int"),
    "some parameters": (
        "import torch\ndef make(named, run): return torch.optim.SGD([named[0][1]], lr=1)",
        {"own.optimizer": "ours:make"},
        "leaves .* and .* more out",
    ),
    "state in groups": (
        "import torch\nclass O(torch.optim.SGD):\n  def step(self):\n    self.param_groups[0]['k'] = 1\n"
        "def make(named, run): return O([p for _, p in named], lr=1)",
        {"own.optimizer": "ours:make"},
        "keeps `k` in its groups",
    ),
    "state that is no tensor": (
        "import torch\nclass O(torch.optim.SGD):\n  def step(self):\n"
        "    for p in self.param_groups[0]['params']: self.state[p]['k'] = [1]\n"
        "def make(named, run): return O([p for _, p in named], lr=1)",
        {"own.optimizer": "ours:make"},
        "keeps `k` of .* as list",
    ),
    "schedule": (
        "def rate(step, steps): return float('nan')",
        {"own.schedule": "ours:rate", "train.schedule": {}},
        "own.schedule gave nan for step 0",
    ),
    "block": ("def block(shape, layer): pass", {"own.block": "ours:block"}, "a subclass of shoal.Block"),
    "hook": ("class H:\n  def __init__(self, run): pass", {"own.hooks": ["ours:H"]}, "no subclass of shoal.Hook"),
    "hook state": (
        "import shoal\nclass H(shoal.Hook):\n  def __init__(self, run): pass\n  def state(self): return {1, 2}",
        {"own.hooks": ["ours:H"]},
        "is no JSON",
    ),
    "start values": (
        "import shoal, torch\nclass B(shoal.Block):\n  def __init__(self, shape, layer):\n"
        "    super().__init__(shape, layer)\n    self.gain = torch.nn.Parameter(torch.ones(3))",
        {"own.block": "ours:B"},
        "gain has no start values: say them in `starts`",
    ),
    "loop that ends": (
        "def train(session):\n  for step in session.steps():\n    session.step()\n    break",
        {"own.loop": "ours:train"},
        "the loop ended at step 1 of 2, and the state is saved",
    ),
    "loop without steps": (
        "def train(session):\n  for step in session.steps(): pass",
        {"own.loop": "ours:train"},
        "step 1 was not taken",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_in_own_code_is_one_sentence(wrong: str, tmp_path: Path) -> None:
    code, changes, says = WRONG[wrong]
    with pytest.raises(ShoalError, match=says) as e:
        of_code(tmp_path, code, **changes)
    assert "\n" not in str(e.value)
    assert e.value.exit_code == 2


def test_start_values_of_an_own_block(tmp_path: Path) -> None:
    code = """
        import shoal, torch
        class B(shoal.Block):
            starts = {"gain": lambda even: torch.ones_like(even)}
            def __init__(self, shape, layer):
                super().__init__(shape, layer)
                self.gain = torch.nn.Parameter(torch.empty(shape.dim))
            def forward(self, x, beside, *padding):
                return super().forward(x * self.gain, beside, *padding)
    """
    mine = of_code(tmp_path, code, **{"own.block": "ours:B"})
    usual = here(make_run(tmp_path / "data", name="usual", **{"train.steps": 1}), tmp_path)
    assert losses_of(mine)[0] == losses_of(usual)[0]  # multiplied by one
    assert next(r for r in journal.records(mine.journal_file) if r["kind"] == "start")["peak_flops"] is None  # no MFU
    params = [next(r["params"] for r in journal.records(d.journal_file) if r["kind"] == "start") for d in (mine, usual)]
    assert params[0] == params[1] + 64


FROZEN = """
    import shoal, torch
    class B(shoal.Block):
        starts = {"b": torch.zeros_like}
        def __init__(self, shape, layer):
            super().__init__(shape, layer)
            self.requires_grad_(False)
            self.a = torch.nn.Linear(shape.dim, 4, bias=False)
            self.b = torch.nn.Linear(4, shape.dim, bias=False)
        def forward(self, x, beside, *padding):
            return super().forward(x, beside, *padding) + self.b(self.a(x))
"""


def test_what_is_frozen_stays_and_has_no_optimizer_state(folder: Path) -> None:
    """As an adapter does it: a few small matrices learn beside a model that does not."""
    (folder / "frozen.py").write_text(textwrap.dedent(FROZEN))
    changes = {"train.steps": 4, "own.block": "frozen:B"}
    alone = train_on(asked(folder, "frozen1", **changes), folder, 1)
    shared = train_on(asked(folder, "frozen2", **changes, **{"mesh.dp_shard": 2}), folder, 2)
    np.testing.assert_allclose(losses_of(shared), losses_of(alone), rtol=2e-6)
    found = checkpoint.open_checkpoint(alone.checkpoints, checkpoint.published(alone.checkpoints)[0].name)
    names = set(found.manifest.tensors)
    assert {n for n in names if n.startswith("optim.blocks.0")} == {
        f"optim.blocks.0.{part}.weight.{moment}" for part in "ab" for moment in ("exp_avg", "exp_avg_sq")
    }


def test_an_error_in_own_code_is_shown_by_its_line(tmp_path: Path) -> None:
    code = "\n\ndef loss(logits, targets):\n    return logits @ targets\n"
    with pytest.raises(RuntimeError) as e:
        of_code(tmp_path, code, **{"own.objective": "ours:loss"})
    assert own_place(e.value) == "ours.py:4: "


def test_a_loop_of_ones_own_takes_the_same_steps(folder: Path, alone: RunDir) -> None:
    (folder / "loops.py").write_text(
        "def train(session):\n"
        "    for step in session.steps():\n"
        "        record = session.step(lambda batches, backward: backward(batches))\n"
        "        session.log(twice=2 * record['loss'])\n"
    )
    looped = here(asked(folder, "looped", **ALL, **{"own.loop": "loops:train"}), folder)
    assert digest_of(looped) == digest_of(alone)
    assert [m["twice"] for m in metrics_of(looped)] == [2 * loss for loss in losses_of(looped)]


def test_a_session_whose_run_spikes_takes_the_steps_again_by_itself(folder: Path, monkeypatch: Any) -> None:
    """`step` goes back, and returns when the step that was asked for is taken."""
    from shoal.train import loop
    from shoal.train.numerics import Rewind

    run = decide(asked(folder, "spike", **{"train.steps": 6, "checkpoint.every": 2}), folder, 1).run
    run_dir = RunDir.of(run.name, folder)
    run_dir.path.mkdir(parents=True)
    run_dir.spec_file.write_text(dump(run))
    real, taken = loop.train_step, list[int]()

    def spiking(t: Any, step: int, gradient: Any) -> Any:
        taken.append(step)
        if step == 3 and taken.count(3) == 1:
            raise Rewind(2, 3, "a spike", 0.0)
        return real(t, step, gradient)

    monkeypatch.setattr(loop, "train_step", spiking)
    with Session(run_dir, run, join(run), lambda: False) as s:
        asked_for = [step for step in s.steps() if s.step()["step"] == step + 1]
    assert asked_for == [0, 1, 2, 3, 4, 5]
    assert taken == [0, 1, 2, 3, 2, 3, 4, 5]


def test_what_is_carried_is_what_is_imported(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    for name, text in {
        "a.py": "import b\nimport torch\n",
        "b.py": "def f():\n    from pack.inner import x\n",
        "pack/__init__.py": "",
        "pack/inner.py": "x = 1",
        "pack/words.txt": "data of the package",
        "other.py": "",
        "run.yaml": "",
    }.items():
        (tmp_path / name).write_text(text)
    changes = {"own.objective": "a:loss", "own.hooks": ["installed.thing:Hook"], "own.folder": str(tmp_path)}
    run = make_run(tmp_path, **changes)
    assert list(files_of(run, tmp_path)) == ["a.py", "b.py", "pack/__init__.py", "pack/inner.py", "pack/words.txt"]
    with pytest.raises(SpecError, match=r"own.hooks.0 names installed.thing:Hook: there is no module installed"):
        carry(run, RunDir(tmp_path / "runs" / "x"))


def test_secrets_and_links_that_lead_out_do_not_travel(tmp_path: Path) -> None:
    package, outside = tmp_path / "here" / "pack", tmp_path / "id_rsa"
    package.mkdir(parents=True)
    outside.write_text("a secret of the machine")
    for name in ("__init__.py", "a.txt", ".env", "server.key"):
        (package / name).write_text("")
    (package / "out").symlink_to(outside)
    (package / "in").symlink_to(package / "a.txt")
    run = make_run(tmp_path, **{"own.objective": "pack:loss", "own.folder": str(tmp_path / "here")})
    assert list(files_of(run, tmp_path / "here")) == ["pack/__init__.py", "pack/a.txt", "pack/in"]


@pytest.mark.parametrize("policy", ["keep", "take", "refuse"])
def test_code_that_has_changed_since_a_run_began(tmp_path: Path, policy: str) -> None:
    file, run_dir = tmp_path / "a.py", RunDir(tmp_path / "runs" / "x")
    file.write_text("def loss(): return 1\n")
    run = make_run(tmp_path, **{"own.objective": "a:loss", "own.folder": str(tmp_path), "own.changed": policy})
    assert carry(run, run_dir) is None
    file.write_text("def loss(): return 2\n")
    said = carry(run, run_dir)  # no checkpoint yet: a mistake is mended, and the run goes on with it
    assert said is not None
    assert "the new ones are taken" in said
    assert load_code(run, run_dir.code).objective() == 2
    (run_dir.checkpoints / "step").mkdir(parents=True)
    file.write_text("def loss(): return 3\n")
    if policy == "refuse":
        with pytest.raises(SpecError, match=r"has changed since the run began \(a.py\)"):
            carry(run, run_dir)
        return
    said = carry(run, run_dir)
    assert said is not None
    assert "a.py" in said
    assert load_code(run, run_dir.code).objective() == (2 if policy == "keep" else 3)


def test_two_runs_in_one_process_have_each_their_own_code(tmp_path: Path) -> None:
    found = []
    for i in range(2):
        place = tmp_path / str(i)
        place.mkdir()
        (place / "same.py").write_text(f"def loss(): return {i}\n")
        run = make_run(tmp_path, **{"own.objective": "same:loss", "own.folder": str(place)})
        carry(run, RunDir(place / "run"))
        found.append(load_code(run, place / "run" / "code").objective())
    assert found == [0, 1]
