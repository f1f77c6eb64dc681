"""Checkpoints that DeepSpeed 0.19.8 itself writes come in as its own scripts read them, to the bit."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.checkpoint.foreign.bring_in import Source, open_source
from tests.zero import theirs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("deepspeed")]
NOT_IN_THEIRS = {"zero-1": {"frozen.weight", "frozen.bias"}}  # which `zero_to_fp32` leaves out without a word


@pytest.fixture(scope="module")
def saved(deepspeed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    theirs.save(folder)
    return folder


def read(folder: Path) -> tuple[Source, dict[str, torch.Tensor]]:
    with ExitStack() as stack:
        source = open_source(str(folder), folder.parent, stack)
    return source, {name: tensor.whole() for name, tensor in source.tensors.items()}


@pytest.mark.parametrize("kind", ["zero-1", "zero-2", "zero-3"])
def test_weights_are_those_of_zero_to_fp32_to_the_bit(kind: str, saved: Path) -> None:
    source, found = read(saved / kind)
    expected = load_file(saved / f"{kind}.safetensors")
    moments = {name for name in found if name.startswith("optimizer.state.")}
    assert found.keys() - moments == expected.keys() | NOT_IN_THEIRS.get(kind, set())
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in expected.items()
    )
    assert (source.step, len(moments)) == (theirs.STEPS, 2 * 6)


@pytest.mark.parametrize("kind", ["zero-1", "zero-2", "zero-3"])
def test_a_universal_checkpoint_holds_the_same_to_the_bit_and_the_moments_too(kind: str, saved: Path) -> None:
    _, found = read(saved / kind)
    source, universal = read(saved / kind / "universal")
    assert source.kind == "a universal checkpoint of DeepSpeed"
    assert found.keys() == universal.keys()
    assert all(torch.equal(universal[name], tensor) for name, tensor in found.items())


def test_every_stage_has_the_same_moments(saved: Path) -> None:
    """So they lie where the weights do: DeepSpeed has no script that merges them, but for the universal one."""
    _, one = read(saved / "zero-1")
    for kind in ("zero-2", "zero-3"):
        _, other = read(saved / kind)
        for name in (n for n in one if n.startswith("optimizer.state.")):
            torch.testing.assert_close(other[name], one[name], rtol=1e-5, atol=1e-9)


def test_weights_under_bf16_come_in_as_the_float32_that_they_are(saved: Path) -> None:
    """`zero_to_fp32` says of them that they are no checkpoint of ZeRO; rounded, they are the model's own."""
    _, found = read(saved / "bf16")
    source, _ = read(saved / "bf16" / "global_step3")
    model = load_file(saved / "bf16.safetensors")
    assert source.step == theirs.STEPS
    trained = {name for name in found if f"optimizer.state.{name}.exp_avg" in found}
    assert len(trained) == 6
    assert all(found[name].dtype == torch.float32 for name in trained)
    assert all(torch.equal(found[name].bfloat16(), model[name]) for name in trained)
    assert any(not torch.equal(found[name], model[name].float()) for name in trained)
