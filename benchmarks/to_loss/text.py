"""The text that is learned: Python source of this machine's own installation, in an order that does not change.

Made once by `shoal data`; then every system reads the same windows in the same order, documents packed and not masked,
as the peers mask none.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shoal.data.order import Order
from shoal.data.shards import TokenShards
from shoal.data.windows import Batch, Windows
from shoal.train.evaluate import all_windows

SMALLEST, LARGEST = 200, 200_000  # bytes of a file: no empty modules, no tables of thousands of numbers
BYTES_PER_TOKEN = 4.2  # more than any vocabulary here has, so that the text is enough
LEARNED_FROM_MB = 12  # by the tokenizer
HELD_OUT = 0.03


def prepared(folder: Path, tokens: int, vocab: int) -> Path:
    """The folder of the token shards, made if it is not there."""
    data = folder / f"python-{vocab}-{tokens}"
    if (data / "train" / "index.json").is_file() and (data / "eval" / "index.json").is_file():
        return data
    folder.mkdir(parents=True, exist_ok=True)
    text, tokenizer = folder / "python.jsonl", folder / f"tokenizer-{vocab}.json"
    want = round(tokens * BYTES_PER_TOKEN * (1 + HELD_OUT))
    print(f"text: Python source of {sys.prefix}", file=sys.stderr, flush=True)
    with text.open("w", encoding="utf-8") as out:
        for source in _sources():
            out.write(json.dumps({"text": source}) + "\n")
            want -= len(source)
            if want < 0:
                break
        else:
            print(f"text: {want / 1e6:.0f} MB short, so some windows come twice", file=sys.stderr, flush=True)
    size = ["--vocab-size", str(vocab), "--max-mb", str(LEARNED_FROM_MB)]
    _shoal("data", "tokenizer", str(text), *size, "--out", str(tokenizer))
    _shoal(
        "data",
        "prepare",
        str(text),
        "--tokenizer",
        str(tokenizer),
        "--eval-fraction",
        str(HELD_OUT),
        "--out",
        str(data),
    )
    return data


class Reader:
    """Windows by step, the same for every system."""

    def __init__(self, data: Path, seq: int, batch: int) -> None:
        self._windows, self._held_out = (
            Windows([TokenShards.open(data / part)], seq, mask_documents=False) for part in ("train", "eval")
        )
        self._order = Order(self._windows.sizes, [1.0], seed=0)
        self._batch = batch

    def batch(self, step: int) -> Batch:
        return self._windows.batch(*self._order.at(step * self._batch, self._batch))

    def held_out(self, windows: int) -> list[Batch]:
        """Whole batches, so that nothing is compiled anew for a smaller one."""
        _, ids = all_windows(self._held_out, max(1, windows // self._batch) * self._batch)
        ids = np.resize(ids, -(-len(ids) // self._batch) * self._batch)
        return [
            self._held_out.batch(np.zeros(self._batch, np.int64), ids[at : at + self._batch])
            for at in range(0, len(ids), self._batch)
        ]


def _sources() -> Iterator[str]:
    """Each text once, in the order of the hashes of their names, which mixes the packages."""
    installed = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    roots = dict.fromkeys(Path(root) for root in (sysconfig.get_paths()["stdlib"], *installed))
    files = {file: file.relative_to(root).as_posix() for root in roots for file in root.rglob("*.py")}
    seen: set[bytes] = set()
    for file, _ in sorted(files.items(), key=lambda item: (_hash(item[1].encode()), item[1])):
        try:
            content = file.read_bytes()
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if SMALLEST <= len(content) <= LARGEST and (digest := _hash(content)) not in seen:
            seen.add(digest)
            yield text


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _shoal(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "shoal", *words], check=True, stdout=subprocess.DEVNULL)
