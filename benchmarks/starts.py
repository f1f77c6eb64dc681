"""What the start of a document is worth: one model learns the same documents by the old rule (nothing stands before a
document) and by the new one (its start token does), and is asked about documents that were held out, token by token.

    python benchmarks/starts.py --prepare starts.zip            here: documents and tokenizer, some minutes, under 20 MB
    python benchmarks/starts.py --data starts.zip               on a GPU: two rules, two seeds, under three minutes
    python benchmarks/starts.py --data starts.zip --variant default --variant floor0 train.schedule.min_ratio=0
    python benchmarks/starts.py --tiny                          a processor, shipped text, to try the code: no claim

A variant is a name and overrides of the run file; `rule=old` is data without start tokens. Each is trained by `shoal
train` once a seed, four at a time. Documents are docstrings of the Python packages of the machine that prepares:
short, many, and each begins in its own way. Held-out loss is asked in two ways: with the start token (the end token's
place in old data, where `sample` and other programs would begin) and without, from the second token on. `±` is half
the distance between the seeds.

Bars: with its start token, the new rule's first token costs less than the old's; from the second token on, each asked
as it was taught (the new one with the start token, the old one without), the new rule costs at most 1% more.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from benchmarks.to_loss.text import _sources  # noqa: E402

from shoal.checkpoint import read_full  # noqa: E402
from shoal.checkpoint.find import newest_readable  # noqa: E402
from shoal.data.shards import TokenShards  # noqa: E402
from shoal.journal.rundir import RunDir  # noqa: E402
from shoal.model.decoder import Decoder  # noqa: E402
from shoal.spec import load  # noqa: E402
from shoal.spec.shape import shape_of  # noqa: E402

TEXT, TOKENIZER = "text.jsonl", "tokenizer.json"
SHORTEST = 40  # characters of a document
WANT_MB = 24.0
HELD_OUT = 0.05
RULES = {"old": ["--start", "none"], "new": []}
AT_ONCE = 4
NEAR = 0.01
Places = Mapping[str, tuple[int, int | None]]  # the first and the last token of a document that count, from 1
WITH_START: Places = {"first": (1, 1), "first 8": (1, 8), "first 64": (1, 64), "all": (1, None), "from 2": (2, None)}
WITHOUT: Places = {"2 to 8": (2, 8), "2 to 64": (2, 64), "2 on": (2, None)}
SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "model": {"dim": 512, "layers": 10, "heads": 8, "kv_heads": 4, "ffn_dim": 1408},  # 38M with the vocabulary
        "train": {"steps": 300, "batch": 64, "optimizer": {"lr": 1e-3}},
        "seq": 512,
        "vocab": 8192,
        "documents": 4096,
    },
    "tiny": {
        "model": {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 128},
        "train": {"steps": 20, "batch": 8, "optimizer": {"lr": 3e-3}},
        "seq": 64,
        "vocab": 512,
        "documents": 64,
    },
}


def main() -> int:
    args = _arguments()
    size = SIZES["tiny" if args.tiny else "full"]
    if args.prepare:
        write_archive(args.prepare, docstrings(args.megabytes), size["vocab"])
        print(f"wrote {args.prepare}: {args.prepare.stat().st_size / 1e6:.1f} MB")
        return 0
    variants = {name: overrides for name, *overrides in args.variant} or {"old": ["rule=old"], "new": ["rule=new"]}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        archive = args.data or work / "text.zip"
        if not args.data:
            write_archive(archive, shipped(), size["vocab"])
        _prepare(archive, work)
        rows = _all(work, variants, range(args.seeds), size)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return judge(rows, claims=not args.tiny)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="write documents and tokenizer there, and end")
    parser.add_argument("--megabytes", type=float, default=WANT_MB, help="of text for --prepare (default: %(default)s)")
    parser.add_argument("--data", type=Path, metavar="FILE", help="what --prepare wrote")
    parser.add_argument("--variant", action="append", nargs="+", default=[], metavar=("NAME", "KEY=VALUE"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="write all losses there, as JSON")
    args = parser.parse_args()
    if not args.tiny and not args.data and not args.prepare:
        parser.error("give --data (which --prepare writes), or --tiny")
    return args


# --- text


def docstrings(megabytes: float) -> Iterator[str]:
    """Of the packages of this Python, each once, in an order that mixes the packages."""
    left, seen = megabytes * 1e6, set()
    for source in _sources():
        for text in _docstrings_in(source):
            if len(text) >= SHORTEST and text not in seen:
                seen.add(text)
                yield text
                left -= len(text)
        if left < 0:
            return


def _docstrings_in(source: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def shipped() -> Iterator[str]:
    """Paragraphs of the text in this repository."""
    text = (ROOT / "examples/text/moby-dick.txt").read_text(encoding="utf-8")[:400_000]
    yield from (part for part in text.split("\n\n") if len(part) >= SHORTEST)


def write_archive(file: Path, texts: Iterator[str], vocab: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        text, tokenizer = Path(folder) / TEXT, Path(folder) / TOKENIZER
        with text.open("w", encoding="utf-8", errors="replace") as out:
            out.writelines(json.dumps({"text": one}) + "\n" for one in texts)
        _shoal("data", "tokenizer", text, "--vocab-size", vocab, "--max-mb", 8, "--out", tokenizer)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for one in (text, tokenizer):
                archive.write(one, one.name)


def _prepare(archive: Path, work: Path) -> None:
    with zipfile.ZipFile(archive) as packed:
        for name in (TEXT, TOKENIZER):
            packed.extract(name, work)
    for rule, option in RULES.items():
        told = ["--tokenizer", work / TOKENIZER, "--eval-fraction", HELD_OUT, "--out", work / rule, *option]
        _shoal("data", "prepare", work / TEXT, *told)


def held_out(folder: Path, count: int) -> tuple[list[list[int]], int, int]:
    """Documents without their marks, and the ids of start and end."""
    data = TokenShards.open(folder)
    assert data.start_id is not None
    documents: list[list[int]] = []
    for i in range(len(data.index.shards)):
        ends = [0, *data.shard(i).ends.tolist()]
        for lo, hi in pairwise(ends):
            documents.append(data.shard(i).tokens[lo + 1 : hi - 1].tolist())
    step = max(1, len(documents) // count)
    return documents[::step][:count], data.start_id, data.eos_id


# --- runs


def _all(
    work: Path, variants: Mapping[str, Sequence[str]], seeds: Sequence[int], size: Mapping[str, Any]
) -> list[dict[str, Any]]:
    documents, start, end = held_out(work / "new" / "eval", size["documents"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(AT_ONCE if device.type == "cuda" else 1) as pool:
        jobs = list(product(variants, seeds))
        told = [pool.submit(_train, work, f"{name}-{seed}", variants[name], seed, size) for name, seed in jobs]
        for (name, seed), one in zip(jobs, told, strict=True):
            model = _trained(one.result(), device)
            loss = by_place(model, documents, WITH_START, start, end, size["seq"])
            loss |= by_place(model, documents, WITHOUT, None, end, size["seq"])
            rows.append({"variant": name, "seed": seed, "overrides": list(variants[name]), "loss": loss})
            print(f"{name}, seed {seed}: held-out {loss['all']:.4f}", file=sys.stderr, flush=True)
    return rows


def _train(work: Path, name: str, overrides: Sequence[str], seed: int, size: Mapping[str, Any]) -> RunDir:
    rule = next((o.removeprefix("rule=") for o in overrides if o.startswith("rule=")), "new")
    steps = size["train"]["steps"]
    spec = {
        "name": name,
        "seed": seed,
        "model": size["model"],
        "data": {"train": str(work / rule / "train"), "seq_len": size["seq"]},
        "train": size["train"],
        "checkpoint": {"every": steps},
        "track": {"mlflow": False},
        "resources": {"processes": 1},
    }
    file = work / f"{name}.yaml"
    file.write_text(json.dumps(spec))  # which is YAML too
    _shoal("train", file, *(o for o in overrides if not o.startswith("rule=")), "--workspace", work)
    return RunDir.of(name, work)


def _trained(run_dir: RunDir, device: torch.device) -> Decoder:
    spec = load(run_dir.spec_file).run
    _, tensors = newest_readable(run_dir.checkpoints, read_full, lambda words: print(words, file=sys.stderr))
    with torch.device("meta"):
        model = Decoder(shape_of(spec.model))
    model.load_state_dict(tensors, assign=True)
    return model.to(device)


@torch.no_grad()
def by_place(
    model: Decoder, documents: Sequence[Sequence[int]], places: Places, start: int | None, end: int, seq: int
) -> dict[str, float]:
    """The mean loss of the tokens at these places of a document, its end among them; with `start` before it, or none.

    A row is one document, as far as it fits; padding comes after it, where no token that counts looks."""
    sums, counts = dict.fromkeys(places, 0.0), dict.fromkeys(places, 0)
    ordered = sorted(documents, key=len)
    device = model.embed.weight.device
    for at in range(0, len(ordered), 32):
        rows = [([] if start is None else [start]) + [*one, end] for one in ordered[at : at + 32]]
        longest = min(max(map(len, rows)) - 1, seq)
        ids = torch.tensor([(row + [end] * longest)[: longest + 1] for row in rows], device=device)
        sizes = torch.tensor([min(len(row) - 1, longest) for row in rows], device=device)
        logits = model(ids[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(rows), -1)
        place = torch.arange(longest, device=device) + (2 if start is None else 1)
        real = torch.arange(longest, device=device) < sizes[:, None]
        for name, (first, last) in places.items():
            wanted = real & (place >= first) & (place <= (last or seq + 2))
            sums[name] += float(loss[wanted].double().sum())
            counts[name] += int(wanted.sum())
    return {name: sums[name] / max(counts[name], 1) for name in places}


# --- verdict


def judge(rows: Sequence[Mapping[str, Any]], claims: bool) -> int:
    names = list(dict.fromkeys(row["variant"] for row in rows))
    of = {n: {c: [r["loss"][c] for r in rows if r["variant"] == n] for c in (*WITH_START, *WITHOUT)} for n in names}
    columns = [*WITH_START, *WITHOUT]
    table = [["variant", *columns]]
    table += [[name, *map(_cell, of[name].values())] for name in names]
    for name in names[1:]:
        gaps = [mean(of[name][c]) / mean(of[names[0]][c]) - 1 for c in columns]
        table.append([f"{name} / {names[0]}", *(f"{gap:+.2%}" for gap in gaps)])
    widths = [max(len(row[i]) for row in table) for i in range(len(columns) + 1)]
    asked = sum(widths[: 1 + len(WITH_START)]) + 2 * len(WITH_START)
    print(f"\n{'':<{widths[0] + 2}}{'with the start token':<{asked - widths[0]}}without it")
    for row in table:
        print("  ".join(f"{cell:<{wide}}" for cell, wide in zip(row, widths, strict=True)).rstrip())
    if not claims or {"old", "new"} - of.keys():
        return 0
    old, new = of["old"], of["new"]
    first = mean(new["first"]) < mean(old["first"])
    rest = mean(new["from 2"]) <= mean(old["2 on"]) * (1 + NEAR)
    print(f"{'PASS' if first else 'MISS'}  first token: new {mean(new['first']):.4f}, old {mean(old['first']):.4f}")
    print(f"{'PASS' if rest else 'MISS'}  the others: new {mean(new['from 2']):.4f}, old {mean(old['2 on']):.4f}")
    return int(not (first and rest))


def _cell(seeds: Sequence[float]) -> str:
    spread = f" ±{(max(seeds) - min(seeds)) / 2:.4f}" if len(seeds) > 1 else ""
    return f"{mean(seeds):.4f}{spread}"


def _shoal(*words: object) -> None:
    done = subprocess.run([sys.executable, "-m", "shoal", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"shoal {words[0]} ended with code {done.returncode}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
