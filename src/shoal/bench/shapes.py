"""Which shapes are measured: those of layers of 125M to 70B models and 1k to 32k tokens; on a processor smaller ones.

The order matters: when time is short, the first ones are measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True)
class Product:
    """[m, k] times [k, n]. `of_weights`: the gradient of weights, whose inner side is the tokens and whose operands lie
    in memory the other way round."""

    m: int
    n: int
    k: int
    of_weights: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True)
class Heads:
    batch: int
    heads: int
    kv_heads: int
    seq: int
    head_dim: int

    @property
    def flops(self) -> float:
        """Of the half of the scores that causality leaves, forwards: two products. Backwards there are five."""
        return 2.0 * self.batch * self.heads * self.seq**2 * self.head_dim


BACKWARD = 2.5  # of the forward's operations

# Width, width of the feed-forward layer: 125M, 350M, 1B, 3B, 8B, 13B, 70B.
LAYERS = ((768, 2048), (1024, 2816), (2048, 8192), (3072, 8192), (4096, 14336), (5120, 13824), (8192, 28672))
TOKENS = (8192, 2048, 32768, 1024, 4096, 16384)
VOCABULARY = 128256

ATTENTION = (
    Heads(2, 32, 8, 4096, 128),
    Heads(8, 12, 12, 1024, 64),
    Heads(4, 32, 8, 2048, 64),
    Heads(1, 32, 8, 8192, 128),
    Heads(1, 64, 8, 8192, 128),
    Heads(4, 16, 16, 2048, 64),
    Heads(1, 32, 8, 32768, 128),
    Heads(4, 64, 8, 2048, 128),
    Heads(2, 32, 32, 4096, 128),
    Heads(16, 12, 12, 512, 64),
    Heads(4, 32, 8, 4096, 128),
    Heads(1, 16, 16, 8192, 64),
    Heads(1, 32, 8, 16384, 128),
)
ATTENTION_CPU = (
    Heads(1, 4, 4, 256, 64),
    Heads(1, 8, 8, 512, 64),
    Heads(2, 8, 2, 512, 64),
    Heads(1, 12, 12, 1024, 64),
    Heads(1, 8, 2, 1024, 128),
    Heads(1, 12, 4, 2048, 64),
)

_MIB = 1 << 20
COPIED = tuple(size * _MIB for size in (1024, 256, 64, 16, 4))  # bytes that are copied
COPIED_CPU = tuple(size * _MIB for size in (256, 32, 4, 1))
NORMED = ((16384, 4096), (8192, 768), (8192, 2048), (8192, 8192))  # tokens, width
NORMED_CPU = ((4096, 1024), (1024, 512))

_KIB = 1 << 10
COLLECTED = tuple(size * _KIB for size in (64, 512, 4096, 16384, 65536))
COLLECTED_CPU = tuple(size * _KIB for size in (64, 512, 4096, 16384))


def products(quick: bool) -> list[Product]:
    """For the precision that models are trained in."""
    squares = [Product(s, s, s) for s in (8192, 4096, 2048, 16384, 1024)]
    thin = [Product(8192, 8192, k) for k in (128, 256, 512)]
    layers, tokens = (LAYERS[::2], TOKENS[:3]) if quick else (LAYERS, TOKENS)
    by_layer = [[p for t in tokens for p in _layer(t, *layer)] for layer in layers]
    heads = [p for t in (8192, 2048) for dim in (4096, 768, 2048) for p in _head(t, dim)]
    return [*squares, *thin, *_in_turn([*by_layer, heads])]


def few_products() -> list[Product]:
    """For the others: large ones, and a layer of each kind."""
    squares = [Product(s, s, s) for s in (4096, 8192, 2048)]
    return [*squares, *_layer(8192, 4096, 14336), *_layer(8192, 768, 2048), *_head(2048, 4096)]


def cpu_products() -> list[Product]:
    squares = [Product(s, s, s) for s in (256, 1024, 512, 2048)]
    layers = [p for layer in ((256, 1024), (512, 1536), (768, 2048)) for p in _layer(1024, *layer)]
    return [*squares, *layers, Product(1024, 1024, 64), *_head(512, 512, 16384)]


def _layer(tokens: int, dim: int, ffn: int) -> list[Product]:
    return [
        Product(tokens, ffn, dim),
        Product(tokens, dim, ffn),
        Product(ffn, dim, tokens, of_weights=True),
        Product(tokens, dim, dim),
    ]


def _head(tokens: int, dim: int, vocabulary: int = VOCABULARY) -> list[Product]:
    return [
        Product(tokens, vocabulary, dim),
        Product(tokens, dim, vocabulary),
        Product(vocabulary, dim, tokens, of_weights=True),
    ]


def _in_turn(groups: list[list[Product]]) -> list[Product]:
    """One of each group, then the next of each: where time ends early, every layer has had something."""
    dealt = [p for turn in zip_longest(*groups) for p in turn if p is not None]
    return list(dict.fromkeys(dealt))
