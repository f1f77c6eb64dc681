"""Rotary positions and the rules that stretch them, computed as transformers 5 computes them (tests compare the two).

The frequencies are a plain tensor and no buffer: they never travel in a checkpoint, and a model built on the meta
device has nothing to fill in again.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from shoal.spec.model import RopeScaling
from shoal.spec.shape import Shape


class Rope:
    """Turns positions into the cosines and sines that every block shares."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.scale = _attention_scale(shape.rope_scaling)  # on cos and sin; 1 but for yarn
        self._frequencies = {torch.device("cpu"): frequencies(shape)}

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32, [batch, seq, 1, rotary_dim / 2]: the 1 spreads over the heads."""
        scaling = self.shape.rope_scaling
        if scaling is not None and scaling.kind == "dynamic":
            freqs = _dynamic_frequencies(self.shape, scaling, positions)  # [batch, 1, rotary_dim / 2]
        else:
            freqs = self._on(positions.device)  # [rotary_dim / 2]
        angles = (positions[..., None].float() * freqs)[:, :, None, :]
        return angles.cos() * self.scale, angles.sin() * self.scale

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._frequencies:  # copied once: a copy a step would make a GPU wait for the host
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        return self._frequencies[device]


def sliding_rope(shape: Shape) -> Rope | None:
    """Of layers with a window, where these have a base of their own; nothing stretches them."""
    if shape.sliding_window is None or shape.sliding_rope_theta is None:
        return None
    return Rope(replace(shape, rope_theta=shape.sliding_rope_theta, rope_scaling=None))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [batch, seq, heads, head_dim]; the two halves of a head are the two coordinates, as in Hugging Face. What
    of a head is wider than the angles stays as it is."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*parts, rest) if rest.shape[-1] else parts, dim=-1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same where neighbours are the two coordinates. They come out as halves: scores do not know an order that
    queries and keys have in common."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def frequencies(shape: Shape) -> Tensor:
    """Radians a position turns each pair of a head by, float32 on the CPU, [rotary_dim / 2]."""
    scaling = shape.rope_scaling
    powers = _powers(shape.rotary_dim)
    plain = 1.0 / (shape.rope_theta**powers)
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling, scaling.original_max_seq_len or shape.max_seq_len)
    return _yarn(shape, scaling, powers)


def _powers(head_dim: int) -> Tensor:
    # The device is named because the model may be built inside `with torch.device("meta")`.
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim


def _llama3(plain: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    """Long wavelengths are divided by the factor, short ones stay, those between are blended."""
    wavelength = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * plain / scaling.factor + blend * plain
    stretched = torch.where(wavelength > original / low, plain / scaling.factor, blended)
    return torch.where(wavelength < original / high, plain, stretched)


def _yarn(shape: Shape, scaling: RopeScaling, powers: Tensor) -> Tensor:
    """YaRN (arXiv:2309.00071): interpolate slow dimensions, keep fast ones, ramp between."""
    dim, original = shape.rotary_dim, scaling.original_max_seq_len or shape.max_seq_len

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(shape.rope_theta))

    low = max(math.floor(dimension_of(scaling.beta_fast)), 0)
    high: float = min(math.ceil(dimension_of(scaling.beta_slow)), dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    spread = shape.rope_theta**powers
    keep = 1 - ramp
    return 1.0 / (scaling.factor * spread) * (1 - keep) + 1.0 / spread * keep


def _dynamic_frequencies(shape: Shape, scaling: RopeScaling, positions: Tensor) -> Tensor:
    """Dynamic NTK: the base grows with the length once it passes the trained one. [batch, 1, rotary_dim / 2]

    transformers takes the longest row of the batch and remembers it; here each row has its own length, so that a
    row's logits do not depend on which other rows share its micro-batch.
    """
    original = scaling.original_max_seq_len or shape.max_seq_len
    length = (positions.amax(dim=-1, keepdim=True) + 1).clamp(min=original).float()  # [batch, 1]
    growth = scaling.factor * length / original - (scaling.factor - 1)
    base = shape.rope_theta * growth ** (shape.rotary_dim / (shape.rotary_dim - 2))
    powers = _powers(shape.rotary_dim).to(positions.device)
    return 1.0 / (base[..., None] ** powers)


def _attention_scale(scaling: RopeScaling | None) -> float:
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
