"""Decoding on one GPU: how near it comes to the limit of memory, beside transformers' generate.

    python benchmarks/generate_h200.py decode [--sizes 1b,8b] [--batches 1,64] [--kinds bf16,int8,exact] [--out FILE]
    python benchmarks/generate_h200.py engine --sizes 1b --batches 1,64     through the engine, prompts and all
    python benchmarks/generate_h200.py peer --sizes 1b --batches 1,64       transformers, bf16, its own generate
    python benchmarks/generate_h200.py products | profile                   single kernels

Llama shapes, random weights, bf16, untied head, vocabulary 128,256. The limit of a step is the larger of (bytes of
weights and of keys and values) / (bandwidth of a copy) and (operations) / (rate of a large product), both measured in
the same run. Bars: 0.7 of it at batch 1, 0.5 at batch 64; exact at most 1.35 of plain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.one_gpu.sizes import SIZES, VOCAB

from shoal.generate.eight_bits import quantised
from shoal.generate.engine import Engine
from shoal.generate.graphs import Graphed
from shoal.generate.request import Sampling
from shoal.kernels.decode_products import Norm, Weight, product
from shoal.model import exact
from shoal.model.decoder import Decoder
from shoal.spec.model import Model
from shoal.spec.shape import shape_of

BARS = {1: 0.7, 64: 0.5}
STEPS = 64
GREEDY = Sampling(temperature=0.0)


def timed(work: Callable[[], object], times: int = 10) -> float:
    """Seconds, the median."""
    work()
    found = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def ceilings() -> dict[str, float]:
    return {"bytes_per_s": _copied(), "flops": _multiplied()}


def _copied() -> float:
    a, b = (torch.randint(0, 255, (1 << 32,), dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * a.numel() / timed(lambda: b.copy_(a))


def _multiplied() -> float:
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / timed(lambda: x @ y)


def model_of(name: str, context: int) -> Decoder:
    size = SIZES[name]
    spec = Model(
        vocab_size=VOCAB if name != "tiny" else 1024,
        dim=size.dim,
        layers=size.layers,
        heads=size.heads,
        kv_heads=size.kv_heads,
        ffn_dim=size.ffn_dim,
        max_seq_len=context,
        tie_embeddings=False,
    )
    with torch.device("meta"):
        model = Decoder(shape_of(spec))
    model.to_empty(device="cuda").to(torch.bfloat16).requires_grad_(False).eval()
    torch.manual_seed(0)
    for name_of, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0, 0.02 if "embed" not in name_of else 1.0)
    return model


def seated(runner: Graphed, batch: int, context: int) -> list[Any]:
    """So many texts of this length, as if they had been read; their keys and values are random."""
    for held in (*runner.keys, *runner.values):
        held.normal_()
    seats = []
    for i in range(batch):
        seat = runner.admit([i] * context, 4 * STEPS, f"{i}")
        assert seat is not None
        runner.blocks.grow(seat.held, context)
        seat.length = context
        seats.append(seat)
    return seats


def limit_s(
    model: Decoder, batch: int, context: int, ceiling: dict[str, float], weight_bytes: float = 2
) -> dict[str, float]:
    shape = model.shape
    read = weight_bytes * shape.matrix_params + 2 * 2 * shape.kv_dim * shape.layers * context * batch
    flops = 2 * shape.matrix_params * batch + 4 * shape.q_dim * shape.layers * context * batch
    return {"memory_s": read / ceiling["bytes_per_s"], "compute_s": flops / ceiling["flops"]}


def steps_s(runner: Graphed, seats: Sequence[Any], steps: int = STEPS) -> float:
    """One decode step as an engine asks for it: the next before the last one's tokens are read."""
    before = None
    for i in range(4 + steps):
        if i == 4:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        now = runner.draw(seats, [1 if i == 0 else None] * len(seats), [GREEDY] * len(seats), [i] * len(seats))
        if before is not None:
            before.read()
        before = now
    assert before is not None
    before.read()
    return (time.perf_counter() - begin) / steps


def decode(args: argparse.Namespace, ceiling: dict[str, float]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name in args.sizes.split(","):
        for kind in args.kinds.split(","):
            batches = [int(b) for b in args.batches.split(",")]
            model = model_of(name, args.context + 8 * STEPS)
            if kind == "exact":
                exact.apply(model)
            runner = Graphed(
                model,
                max(batches),
                args.context + 8 * STEPS,
                exact=kind == "exact",
                eight_bits=kind == "int8",
                reuse=False,
            )
            for batch in batches:
                seats = seated(runner, batch, args.context)
                began = time.perf_counter()
                step = steps_s(runner, seats)
                graph = timed(runner._steps[next(s for s in runner._sizes if s >= batch)].run, 20)
                limits = limit_s(model, batch, args.context + STEPS, ceiling, 1 if kind == "int8" else 2)
                share = max(limits.values()) / step
                told[f"{name} {kind} {batch}"] = {"step_s": step, "graph_s": graph, **limits, "share": share}
                bar = BARS.get(batch) if kind == "bf16" else None
                beside = told.get(f"{name} bf16 {batch}") if kind != "bf16" else None
                print(
                    f"{name} {kind:<5} batch {batch:<3} step {1e3 * step:7.3f} ms (graph {1e3 * graph:7.3f}), limit "
                    f"{1e3 * max(limits.values()):7.3f} ms: {share:.3f}"
                    + ("" if bar is None else f"  bar {bar} {'PASS' if share >= bar else 'MISS'}")
                    + ("" if beside is None else f"  {step / beside['step_s']:.2f} of bf16's step")
                    + f"  {batch / step:,.0f} tokens/s  [{time.perf_counter() - began:.0f} s]",
                    flush=True,
                )
                for seat in seats:
                    runner.release(seat)
            runner.close()
            del runner, model
            torch.cuda.empty_cache()
    return told


def engine(args: argparse.Namespace) -> dict[str, Any]:
    """As people ask: so many prompts at once, 256 tokens each. Of the passes in which all write, and of all of it."""
    told: dict[str, Any] = {}
    for name in args.sizes.split(","):
        model = model_of(name, args.context + 512)
        for batch in [int(b) for b in args.batches.split(",")]:
            asking = Engine(model, vocab_size=model.shape.vocab_size, batch=batch, chunk=2048, prefix_cache=False)
            for again in (False, True):  # the first time kernels are compiled
                for i in range(batch):
                    prompt = torch.randint(0, model.shape.vocab_size, (args.context,)).tolist()
                    asking.submit(prompt, Sampling(max_tokens=256, temperature=1.0, top_p=0.95, seed=i))
                began = time.perf_counter()
                times, count = [], 0
                while asking.busy:
                    count += len(asking.step())
                    if asking.running == batch and not asking._reading:
                        times.append(time.perf_counter())
                took = time.perf_counter() - began
                if again:
                    step = (times[-10] - times[10]) / (len(times) - 20)
                    told[f"{name} engine {batch}"] = {"step_s": step, "all_s": took, "tokens": count}
                    print(
                        f"{name} engine, {batch} prompts of {args.context}, top_p 0.95: a pass {1e3 * step:.3f} ms, "
                        f"{batch / step:,.0f} tokens/s; all of it {took:.2f} s, {count / took:,.0f} tokens/s",
                        flush=True,
                    )
            asking._runner.close()  # type: ignore[attr-defined]  # a GPU's runner has it
        del model, asking
        torch.cuda.empty_cache()
    return told


def profile(args: argparse.Namespace) -> None:
    """Which kernels a step is made of."""
    for name in args.sizes.split(","):
        for batch in [int(b) for b in args.batches.split(",")]:
            model = model_of(name, args.context + 8 * STEPS)
            runner = Graphed(model, batch, args.context + 8 * STEPS, exact=args.kinds == "exact")
            seats = seated(runner, batch, args.context)
            steps_s(runner, seats, 4)
            run = runner._steps[batch].run
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
                run()
                torch.cuda.synchronize()
            print(name, batch)
            rows = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
            for row in rows[:14]:
                print(f"  {row.self_device_time_total:9.1f} us {row.count:5d} x  {row.key[:90]}")
            runner.close()
            del runner, model
            torch.cuda.empty_cache()


def products(ceiling: dict[str, float]) -> None:
    """Tiles of a product of one token, in 16 bits and in 8."""
    shapes = {"1b": (2048, 3072, 8192), "8b": (4096, 6144, 14336)}
    tries = [(2, 1024, 4), (4, 1024, 4), (8, 1024, 4), (4, 512, 4), (8, 512, 4), (2, 2048, 4), (4, 512, 2), (8, 512, 2)]
    for name, (dim, qkv, ffn) in shapes.items():
        for what, rows, width, act in (
            ("qkv", qkv, dim, ""),
            ("out", dim, dim, ""),
            ("gate_up", 2 * ffn, dim, "silu"),
            ("down", dim, ffn, ""),
            ("head", VOCAB, dim, ""),
        ):
            copies = max(1, int(400e6 / (2 * rows * width)))
            weights = [Weight(torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)) for _ in range(copies)]
            norm = (
                Norm(torch.rand(width, device="cuda", dtype=torch.bfloat16), 1e-5)
                if what in ("qkv", "gate_up", "head")
                else None
            )
            for bits in (16, 8):
                tiles = [*tries, (4, 2048, 4), (8, 1024, 8)] if bits == 8 else tries
                these = weights if bits == 16 else [quantised(weight) for weight in weights]
                x = torch.randn(1, width, device="cuda", dtype=torch.bfloat16)
                residual = (
                    torch.randn(1, rows, device="cuda", dtype=torch.bfloat16) if what in ("out", "down") else None
                )
                found = [
                    (_each(lambda w: product(x, w, norm, act, residual, tile), these), tile)  # noqa: B023
                    for tile in [None, *tiles]
                ]
                library = _each(lambda w: torch.nn.functional.linear(x, w.matrix), weights)  # noqa: B023
                floor = bits / 8 * rows * width / ceiling["bytes_per_s"]
                best = sorted((s, str(tile)) for s, tile in found if tile is not None)[:3]
                rule = next(s for s, tile in found if tile is None)
                print(
                    f"{name} {what:<8} {bits:>2} bits: floor {1e6 * floor:6.1f} us, "
                    f"library in 16 {1e6 * library:6.1f}, rule {1e6 * rule:6.1f}, best "
                    + ", ".join(f"{1e6 * s:.1f} {t}" for s, t in best),
                    flush=True,
                )


def _each(work: Callable[[Weight], object], weights: Sequence[Weight]) -> float:
    """In a graph, over weights that no cache holds."""
    work(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            work(weight)
    return timed(graph.replay, 8) / len(weights)


def peer(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    told = {}
    for name in args.sizes.split(","):
        size = SIZES[name]
        config = LlamaConfig(
            hidden_size=size.dim,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            head_dim=size.dim // size.heads,
            intermediate_size=size.ffn_dim,
            vocab_size=VOCAB,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            dtype=torch.bfloat16,
        )
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            model = LlamaForCausalLM(config).eval()
            torch.set_default_dtype(torch.float32)
        for batch in [int(b) for b in args.batches.split(",")]:
            ids = torch.randint(0, VOCAB, (batch, args.context), device="cuda")
            mask = torch.ones_like(ids)

            def generate(new: int, ids: Any = ids, mask: Any = mask, model: Any = model) -> float:
                torch.cuda.synchronize()
                begin = time.perf_counter()
                model.generate(
                    ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
                )
                torch.cuda.synchronize()
                return time.perf_counter() - begin

            generate(4)
            step = (generate(36) - generate(4)) / 32
            told[f"{name} transformers {batch}"] = {"step_s": step}
            print(
                f"{name} transformers generate, batch {batch:<3} step {1e3 * step:7.3f} ms  "
                f"{batch / step:,.0f} tokens/s",
                flush=True,
            )
        model = None  # its memory is the next one's
        torch.cuda.empty_cache()
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("decode", "engine", "peer", "products", "profile"), nargs="+")
    parser.add_argument("--sizes", default="1b,8b")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--kinds", default="bf16", help="bf16, int8, exact")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ceiling = ceilings()
    print(f"copy {ceiling['bytes_per_s'] / 1e12:.2f} TB/s, product {ceiling['flops'] / 1e12:.0f} TFLOP/s", flush=True)
    told: dict[str, Any] = {"ceilings": ceiling}
    for what in args.what:
        if what == "products":
            products(ceiling)
        elif what == "profile":
            profile(args)
        else:
            told |= decode(args, ceiling) if what == "decode" else engine(args) if what == "engine" else peer(args)
        if args.out:
            args.out.write_text(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
