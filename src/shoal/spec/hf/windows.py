"""The sliding window of a config.json: which tokens each layer sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import SpecError
from shoal.spec.families import Family
from shoal.spec.hf.numbers import MOST_LAYERS, MOST_POSITIONS, flag, whole

FULL, SLIDING = "full_attention", "sliding_attention"


def window_from_hf(config: Mapping[str, Any], kind: str, family: Family, layers: int) -> tuple[int | None, int]:
    """The window, and how many leading layers ignore it."""
    leading = None if family.window is None else family.window.leading
    window = _window(config, family)
    full = layers if window is None else 0
    if leading is not None and window is not None:
        full = min(whole(config, "max_window_layers", MOST_LAYERS, leading, least=0), layers)
    full = _by_types(config, kind, leading is not None, window, full, layers)
    return (None, 0) if full == layers else (window, full)


def _window(config: Mapping[str, Any], family: Family) -> int | None:
    said = config.get("sliding_window", family.sliding_window)
    if family.window is not None and family.window.switched and not flag(config, "use_sliding_window"):
        return None
    return None if said is None else whole({"sliding_window": said}, "sliding_window", MOST_POSITIONS)


def _by_types(config: Mapping[str, Any], kind: str, by_layers: bool, window: int | None, full: int, layers: int) -> int:
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
    if (window is None and count < layers) or (not by_layers and count != full):
        raise SpecError(
            f"config.json has layer_types of which {count} are {FULL}, and a sliding_window of {window}: family {kind} "
            "does not compute the two together."
        )
    return count
