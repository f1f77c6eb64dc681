"""What every system is asked for: the same model, mesh, batch and data. It goes to each rank as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Size:
    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab: int
    seq: int
    batch: int  # windows of a data-parallel rank


SIZES = {
    "tiny": Size(2, 256, 4, 2, 768, 512, 64, 2),  # to try the scripts
    "170m": Size(8, 1024, 16, 8, 2816, 32_000, 2048, 2),
    "1b": Size(16, 2048, 32, 8, 8192, 128_256, 4096, 4),
}
STEPS = 100_000  # more than anybody takes: a rate that hardly falls, no end


@dataclass(frozen=True)
class Asked:
    size: str
    dp: int  # dp_shard
    tp: int
    device: str
    precision: str
    compiled: bool
    folder: str  # of this system's own
    data: str  # a folder of token shards; tokens.npy is the same for whoever cannot read those
    batch: int = 0  # instead of the size's own

    @property
    def world(self) -> int:
        return self.dp * self.tp

    @property
    def of(self) -> Size:
        size = SIZES[self.size]
        return replace(size, batch=self.batch or size.batch)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.dp * self.of.batch * self.of.seq

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Asked:
        return cls(**json.loads(text))


def make_data(folder: Path, size: Size, windows: int = 2048) -> Path:
    """Random tokens, as one document: attention reaches over whole windows in every system."""
    from shoal.data.index import write_index
    from shoal.data.writer import ShardWriter

    folder.mkdir(parents=True)
    ids = np.random.default_rng(0).integers(0, size.vocab - 1, windows * size.seq + 1)
    kind = "uint16" if size.vocab <= 1 << 16 else "uint32"
    with ShardWriter(folder, "shard-00000", kind) as writer:
        writer.add(np.append(ids, size.vocab - 1))
        info = writer.close()
    write_index(folder, [info], dtype=kind, vocab_size=size.vocab, eos_id=size.vocab - 1, tokenizer="byte", source={})
    np.save(folder / "tokens.npy", ids.astype(np.int32))
    return folder
