"""Tables of published runs, as `shoal plan validate` reads them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

# Llama 3 8B on 8 H100, as somebody might publish it.
ROW: dict[str, Any] = {
    "row_id": "1",
    "source": "somebody",
    "model": "Llama 3 8B",
    "params_B": 8.03,
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
    "seq": 8192,
    "gpu_type": "H100-SXM-80GB",
    "n_gpus": 8,
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "sharding": "FSDP",
    "microbatch": 1,
    "global_batch": 16,
    "precision": "bf16",
    "recompute": "none",
    "tokens_s_gpu": 8000,
    "software": "torchtitan 2024-10",
}


def table(path: Path, *changes: dict[str, Any], without: str = "") -> Path:
    """One row for each of the changes; a value of None leaves the cell empty."""
    columns = [name for name in dict.fromkeys([*ROW, *(name for row in changes for name in row)]) if name != without]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({name: "" if v is None else v for name, v in {**ROW, **row}.items()} for row in changes)
    return path
