"""Presets are the published shapes: they count the published parameters."""

from __future__ import annotations

import pytest

from shoal.decide.checks import trainable
from shoal.errors import SpecError
from shoal.spec.model import Model
from shoal.spec.presets import Preset, preset, presets
from shoal.spec.run import Run
from shoal.spec.shape import shape_of

# Total and active parameters in billions, as the model cards state them.
CARDS = {
    "smollm2-135m": (0.1345, None), "qwen2.5-0.5b": (0.494, None), "qwen3-0.6b": (0.596, None),
    "llama3.2-1b": (1.236, None), "llama3.2-3b": (3.213, None), "llama2-7b": (6.738, None), "mistral-7b": (7.242, None),
    "qwen2.5-7b": (7.616, None), "llama3-8b": (8.030, None), "qwen3-8b": (8.191, None), "llama2-13b": (13.016, None),
    "bamba-9b": (9.78, None), "gemma3-1b": (1.0, None), "deepseek-v3": (671.0, 37.55),
    "qwen3-30b-a3b": (30.5, 3.3), "qwen3-32b": (32.8, None), "mixtral-8x7b": (46.7, 12.9), "llama2-70b": (68.98, None),
    "llama3-70b": (70.55, None), "qwen2.5-72b": (72.7, None), "qwen3-235b-a22b": (235.1, 22.0),
    "llama3.1-405b": (405.9, None),
}  # fmt: skip
OURS = {"tiny": 257, "small": 4096, "100m": 32768}  # with the vocabulary that each is described with


def run_of(one: Preset) -> Run:
    model = {"preset": one.name, **one.model}
    return Run(name="a", data={"train": "x"}, train={"steps": 1}, model=model)


@pytest.mark.parametrize("name", CARDS)
def test_a_published_shape_counts_the_published_parameters(name: str) -> None:
    shape = shape_of(Model(**presets()[name].model))
    total, active = CARDS[name]
    assert shape.params == presets()[name].params
    assert shape.params == pytest.approx(total * 1e9, rel=0.01)
    assert shape.active_params == pytest.approx((active or total) * 1e9, rel=0.02)


@pytest.mark.parametrize("name", OURS)
def test_a_shape_of_ours_has_the_size_it_states(name: str) -> None:
    assert shape_of(Model(**presets()[name].model), OURS[name]).params == presets()[name].params


def test_no_preset_goes_unchecked_and_the_sizes_span_a_laptop_to_the_405b_class() -> None:
    assert set(presets()) == {*CARDS, *OURS}
    sizes = [one.params for one in presets().values()]
    assert sizes == sorted(sizes)
    assert 1e6 <= sizes[0] <= 3e6
    assert sizes[-1] > 4e11


@pytest.mark.parametrize("one", presets().values(), ids=lambda one: one.name)
def test_every_preset_can_be_trained(one: Preset) -> None:
    trainable(run_of(one))


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"run\.yaml:3: there is no preset 'Llama3-8B'; did you mean llama3-8b\?"):
        preset("Llama3-8B", "run.yaml:3")
