"""The sliding window of a config.json: which tokens each layer sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import SpecError
from shoal.spec.families import Family
from shoal.spec.hf.numbers import MOST_LAYERS, MOST_POSITIONS, flag, whole
from shoal.spec.hf.rope import FULL, SLIDING
from shoal.spec.shape import Shape


def window_from_hf(config: Mapping[str, Any], kind: str, family: Family, layers: int) -> dict[str, Any]:
    """`sliding_window`, and which layers ignore it."""
    if family.window is not None and family.window.every is not None:
        window, every = _by_pattern(config, family, family.window.every, layers)
        return {"sliding_window": window, "full_attention_every": every}
    window, leading = _leading(config, kind, family, layers)
    return {"sliding_window": window, "full_attention_layers": leading}


def window_to_hf(shape: Shape, family: Family) -> dict[str, Any]:
    window = family.window
    if window is None:
        return {}
    if window.every is not None:
        # A class with a pattern always makes the mask of a window, also where no layer has one.
        return {
            "sliding_window": shape.sliding_window or family.sliding_window,
            "sliding_window_pattern": shape.full_attention_every
            or (1 if shape.sliding_window is None else shape.layers + 1),
            "layer_types": [SLIDING if shape.slides(layer) else FULL for layer in range(shape.layers)],
        }
    config: dict[str, Any] = {"sliding_window": shape.sliding_window}
    if window.switched:
        config["use_sliding_window"] = shape.sliding_window is not None
    if window.leading is not None and shape.sliding_window is not None:
        config["max_window_layers"] = shape.full_attention_layers
    return config


def _by_pattern(config: Mapping[str, Any], family: Family, default: int, layers: int) -> tuple[int | None, int | None]:
    """The window, and that each so-many-th layer sees all."""
    window = whole(config, "sliding_window", MOST_POSITIONS, family.sliding_window)
    every = whole(config, "sliding_window_pattern", MOST_LAYERS, default)
    types = config.get("layer_types")
    if types is not None:
        _check_types(types, layers)
        every = types.index(FULL) + 1 if FULL in types else layers + 1
        if types != [SLIDING if (i + 1) % every else FULL for i in range(layers)]:
            raise SpecError(f"config.json has layer_types in which {FULL} does not come at equal distances.")
    if every == 1:
        return None, None
    return window, every if every <= layers else None


def _check_types(types: object, layers: int) -> None:
    if not isinstance(types, list) or len(types) != layers or not all(one in (FULL, SLIDING) for one in types):
        raise SpecError(f"config.json has layer_types that are no list of {layers} names {FULL} or {SLIDING}.")


def _leading(config: Mapping[str, Any], kind: str, family: Family, layers: int) -> tuple[int | None, int]:
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
    _check_types(types, layers)
    count = types.count(FULL)
    if types != [FULL] * count + [SLIDING] * (layers - count):
        raise SpecError("config.json has layer_types in an order Shoal does not compute (full first, then sliding).")
    if (window is None and count < layers) or (not by_layers and count != full):
        raise SpecError(
            f"config.json has layer_types of which {count} are {FULL}, and a sliding_window of {window}: family {kind} "
            "does not compute the two together."
        )
    return count
