"""`shoal data prepare` makes at least 2x the tokens/s of `datasets.map` with the same tokenizer on the same 2 cores.

The peer is what people write: a transformers `PreTrainedTokenizerFast` in `Dataset.map(batched=True, num_proc=2)`. A
second one, run once, calls the `tokenizers` library itself in the same map. All read the same JSONL and give the same
ids, which is checked. Of the peers only `map` is timed, with the text loaded and the cache empty; of Shoal all of
`prepare` is: start of workers, reading JSON, tokenizing, checksums, fsync.

The text is the shipped prose, its paragraphs shuffled into documents, with 2% of the words replaced by ones that never
come again: repeating 2.5 MB of text would flatter a program that remembers words.

Memory is the sum of the resident sizes of a program and its children, sampled every 50 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import xxhash

from shoal.data.shards import TokenShards

TEXT = Path(__file__).resolve().parent.parent / "examples" / "text"
BAR = 2.0
CORES = 2
RARE = 0.02
VOCAB = 16_384

PEER = """
import json, sys, shutil, tempfile, time
import datasets, xxhash, numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
datasets.disable_progress_bars()
corpus, tokenizer_file, cores = sys.argv[1], sys.argv[2], int(sys.argv[3])
fast = PreTrainedTokenizerFast(tokenizer_file=tokenizer_file)
plain = Tokenizer.from_file(tokenizer_file)
bare = {"add_special_tokens": False}
ways = {
    "transformers": lambda rows: {"input_ids": fast(rows["text"], **bare)["input_ids"]},
    "tokenizers": lambda rows: {"input_ids": [e.ids for e in plain.encode_batch(rows["text"], **bare)]},
}
rows = datasets.load_dataset("json", data_files=corpus, split="train", cache_dir=tempfile.mkdtemp(dir=sys.argv[4]))
print("ready", flush=True)
for line in sys.stdin:
    way = line.strip()
    cache = tempfile.mkdtemp(dir=sys.argv[4])
    began = time.perf_counter()
    out = rows.map(ways[way], batched=True, num_proc=cores, remove_columns=rows.column_names,
                   load_from_cache_file=False, cache_file_name=cache + "/out.arrow")
    seconds = time.perf_counter() - began
    digest, tokens = xxhash.xxh3_64(), 0
    for batch in out.with_format("numpy").iter(1000):
        for ids in batch["input_ids"]:
            digest.update(ids.astype("<u4").tobytes())
            tokens += len(ids)
    print(json.dumps({"seconds": seconds, "tokens": tokens, "digest": digest.hexdigest()}), flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=24.0, help="size of the corpus")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
    try:
        return compare(folder, args.mb, args.repeat)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare(folder: Path, mb: float, repeat: int) -> int:
    corpus = make_corpus(folder / "corpus.jsonl", mb * 1e6)
    tokenizer = folder / "tokenizer.json"
    texts = (TEXT / "moby-dick.txt", TEXT / "state-of-the-union.jsonl")
    shoal("tokenizer", *texts, "--vocab-size", VOCAB, "--out", tokenizer)
    results: dict[str, list[Result]] = {"shoal": [], "transformers": [], "tokenizers": []}
    with Peer(corpus, tokenizer, folder) as peer:
        for i in range(repeat):
            out = folder / f"shoal-{i}"
            results["transformers"].append(peer.map("transformers"))
            with PeakMemory(leave_out=peer.pid) as peak:
                done = shoal("prepare", corpus, "--tokenizer", tokenizer, "--out", out, "--workers", CORES, "--json")
            results["shoal"].append(Result(done["work"]["seconds"], *digest_of(out), peak.bytes))
        results["tokenizers"].append(peer.map("tokenizers"))
    if len({(r.tokens, r.digest) for runs in results.values() for r in runs}) != 1:
        print(f"the token ids differ: {results}")
        return 1
    return report(corpus, results)


def report(corpus: Path, results: dict[str, list[Result]]) -> int:
    names = {
        "shoal": "shoal data prepare --workers 2",
        "transformers": "datasets.map num_proc=2, transformers fast tokenizer",
        "tokenizers": "datasets.map num_proc=2, tokenizers.encode_batch",
    }
    tokens = results["shoal"][0].tokens
    print(f"{corpus.stat().st_size / 1e6:.0f} MB of JSONL, {tokens:,} tokens of {VOCAB:,}; all give the same ids\n")
    print(f"{'':<54} {'best s':>9} {'tokens/s':>10} {'memory':>8}")
    for name, runs in results.items():
        best_s = min(r.seconds for r in runs)
        memory = max(r.rss_bytes for r in runs)
        print(f"{names[name]:<54} {best_s:>9.2f} {tokens / best_s / 1e3:>9,.0f}k {memory / 2**20:>5,.0f} MiB")
    # The best of each, because what others do on the machine only ever adds time; they ran in turns.
    ratio = min(r.seconds for r in results["transformers"]) / min(r.seconds for r in results["shoal"])
    print("\nseconds: " + "; ".join(f"{k} {', '.join(f'{r.seconds:.1f}' for r in v)}" for k, v in results.items()))
    print(f"ratio {ratio:.1f}x, bar {BAR}x")
    return int(ratio < BAR)


class Result(NamedTuple):
    seconds: float
    digest: str
    tokens: int
    rss_bytes: int


class Peer:
    """The peer in a process that stays, so that its imports and the loading of the text are not counted."""

    def __init__(self, corpus: Path, tokenizer: Path, folder: Path) -> None:
        command = [sys.executable, "-c", PEER, str(corpus), str(tokenizer), str(CORES), str(folder)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=one_thread_each())
        self.pid = self._process.pid

    def __enter__(self) -> Peer:
        assert self._answer() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def map(self, way: str) -> Result:
        assert self._process.stdin is not None
        with PeakMemory(self.pid) as peak:
            self._process.stdin.write(way + "\n")
            self._process.stdin.flush()
            done = json.loads(self._answer())
        return Result(done["seconds"], done["digest"], done["tokens"], peak.bytes)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def make_corpus(path: Path, size_bytes: float) -> Path:
    rng = random.Random(1851)
    texts = [(TEXT / "moby-dick.txt").read_text(encoding="utf-8")]
    with open(TEXT / "state-of-the-union.jsonl", encoding="utf-8") as f:
        texts += [json.loads(line)["text"] for line in f]
    paragraphs = [p for text in texts for p in text.split("\n") if len(p) > 200]
    written = 0
    with open(path, "w", encoding="utf-8") as f:
        while written < size_bytes:
            words = "\n\n".join(rng.choices(paragraphs, k=rng.randint(1, 12))).split(" ")
            for i in range(len(words)):
                if rng.random() < RARE:
                    words[i] = "".join(rng.choices("etaoinshrdlu", k=rng.randint(4, 12)))
            written += f.write(json.dumps({"text": " ".join(words)}) + "\n")
    return path


def shoal(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "shoal", "data", *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=one_thread_each())
    return json.loads(done.stdout) if "--json" in arguments else {}


def one_thread_each() -> dict[str, str]:
    """All are parallel by processes, one a core; the threads of the library would only get in the way."""
    return os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def digest_of(out: Path) -> tuple[str, int]:
    shards = TokenShards.open(out)
    tokens, _, _ = shards.read(0, shards.tokens)
    ids = tokens[tokens != shards.eos_id]  # the peers write neither start nor end (here one id)
    return xxhash.xxh3_64(ids.astype("<u4").tobytes()).hexdigest(), ids.size


class PeakMemory:
    """The most that a process and its children had resident at once; without a pid, the children of this one."""

    def __init__(self, pid: int | None = None, leave_out: int | None = None) -> None:
        self._root = psutil.Process(pid)
        self._with_root = pid is not None
        self._leave_out = leave_out
        self._over = threading.Event()
        self.bytes = 0

    def __enter__(self) -> PeakMemory:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            below = [c for c in self._root.children() if c.pid != self._leave_out]
            total = self._root.memory_info().rss if self._with_root else 0
            for child in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += sum(p.memory_info().rss for p in (child, *child.children(recursive=True)))
            self.bytes = max(self.bytes, total)


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"({time.monotonic() - began:.0f} s)")
    sys.exit(code)
