"""The sliding window of a config.json: which tokens each layer sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import SpecError
from shoal.spec.hf_values import MOST_LAYERS, MOST_POSITIONS, flag, whole

FULL, SLIDING = "full_attention", "sliding_attention"
_LEADING = {"qwen2": 28, "qwen3": 28, "dots1": 62}  # what transformers takes for `max_window_layers`
_SWITCHED = ("qwen2", "qwen3", "qwen3_moe")  # a window is one only with `use_sliding_window`


def window_from_hf(config: Mapping[str, Any], kind: str, default: int | None, layers: int) -> tuple[int | None, int]:
    """The window, and how many leading layers ignore it. `default` is the family's."""
    window = _window(config, kind, default)
    full = layers if window is None else 0
    if kind in _LEADING and window is not None:
        full = min(whole(config, "max_window_layers", MOST_LAYERS, _LEADING[kind], least=0), layers)
    full = _by_types(config, kind, window, full, layers)
    return (None, 0) if full == layers else (window, full)


def _window(config: Mapping[str, Any], kind: str, default: int | None) -> int | None:
    said = config.get("sliding_window", default)
    if kind in _SWITCHED and not flag(config, "use_sliding_window"):
        return None
    return None if said is None else whole({"sliding_window": said}, "sliding_window", MOST_POSITIONS)


def _by_types(config: Mapping[str, Any], kind: str, window: int | None, full: int, layers: int) -> int:
    """Where `layer_types` says it, how many layers see all. Only Qwen and dots.llm1 go by it; with the others it must
    say what is computed anyway."""
    types = config.get("layer_types")
    if types is None:
        return full
    if not isinstance(types, list) or len(types) != layers or not all(one in (FULL, SLIDING) for one in types):
        raise SpecError(f"config.json has layer_types that are no list of {layers} names {FULL} or {SLIDING}.")
    count = types.count(FULL)
    if types != [FULL] * count + [SLIDING] * (layers - count):
        raise SpecError("config.json has layer_types in an order Shoal does not compute (full first, then sliding).")
    if (window is None and count < layers) or (kind not in _LEADING and count != full):
        raise SpecError(
            f"config.json has layer_types of which {count} are {FULL}, and a sliding_window of {window}: family {kind} "
            "does not compute the two together."
        )
    return count
