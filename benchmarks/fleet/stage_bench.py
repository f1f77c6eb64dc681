"""The measurements of `benchmarks/swarm_stages.py`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.fleet.stage_runs import LOOPBACK, ROOT, WAN, Network, Outcome, Peers

# How activations travel, numbers of a token, what a peer computes, micro-batches of a step. The faster the peers, the
# less may travel, and the more must be under way while a step's first and last ones are.
CASES = [("int8", 4096, 20, 24), ("int8 of 1/8", 512, 100, 64), ("int8 of 1/64", 64, 470, 128)]
BAR_TIME, BAR_LOSS = 1.5, 0.01
FORWARD_S, BACKWARD_S = 0.02, 0.04  # of a micro-batch in a stage: the small model takes a tenth of it on a free core
TRAIN = """
name: stages
seed: 1851
model: {{dim: 128, layers: 4, heads: 4, kv_heads: 2, ffn_dim: 384, tie_embeddings: false}}
data: {{train: {data}/train, seq_len: 128}}
train:
  steps: {steps}
  batch: 32
  optimizer: {{lr: 3e-3}}
  schedule: {{warmup_steps: 5}}
mesh: {{micro_batch: 1}}
resources: {{device: cpu, threads: 1}}
swarm:
  silent: {silent}
  stages: {{count: 4, activations: {activations}, rank: {rank}, save_every: 10}}
"""


def prepared(folder: Path) -> Path:
    texts = [str(ROOT / "examples/text" / name) for name in ("moby-dick.txt", "state-of-the-union.jsonl")]
    shoal = [sys.executable, "-m", "shoal", "data"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": True}
    vocabulary = str(folder / "tokenizer.json")
    subprocess.run([*shoal, "tokenizer", *texts, "--vocab-size", "2048", "--out", vocabulary], **quiet)  # type: ignore[call-overload]
    how = [
        "--separator",
        r"\n\n\n",
        "--tokenizer",
        vocabulary,
        "--eval-fraction",
        "0.05",
        "--out",
        str(folder / "data"),
    ]
    subprocess.run([*shoal, "prepare", *texts, *how], **quiet)  # type: ignore[call-overload]
    return folder / "data"


def peers(
    folder: Path, data: Path, counts: list[int], network: Network, steps: int, activations: str, rank: int = 0
) -> Peers:
    shutil.rmtree(folder / "run", ignore_errors=True)
    (folder / "run").mkdir()
    file = folder / "run" / "run.yaml"
    silent = "5 s" if network.mbit else "30 s"
    file.write_text(TRAIN.format(data=data, steps=steps, activations=activations, rank=rank, silent=silent))
    command = [sys.executable, "-m", "benchmarks.fleet.stage_paced", str(file)]
    command += ["--forward-s", str(FORWARD_S), "--backward-s", str(BACKWARD_S)]
    return Peers(command, counts, folder / "run", network)


def train(folder: Path, data: Path, steps: int) -> int:
    """Four stages, one peer each."""
    found: list[Outcome] = []
    for activations, rank, network in (("fp32", 0, LOOPBACK), ("int8", 0, WAN), ("int8", 16, WAN)):
        with peers(folder, data, [1, 1, 1, 1], network, steps, activations, rank) as started:
            found.append(started.finish(60.0 * steps))
            name = f"{activations} of rank {rank}" if rank else activations
            _row(name, network, found[-1], started.carried_bytes(), steps)
    plain, far, narrow = found
    gap, narrower = (_loss(one) / _loss(plain) - 1 for one in (far, narrow))
    ratio, ratio_narrow = (one.step_s() / plain.step_s() for one in (far, narrow))
    print(f"of rank 16: {ratio_narrow:.2f}x the time, loss {narrower:+.2%}")
    return _verdicts(
        (ratio <= BAR_TIME, f"time a step {ratio:.2f}x of loopback (bar {BAR_TIME}x)"),
        (gap <= BAR_LOSS, f"loss after {steps} steps {gap:+.2%} of the uncompressed cut (bar {BAR_LOSS:.0%})"),
    )


def _row(name: str, network: Network, done: Outcome, carried: int, steps: int) -> None:
    sent = f", {carried / steps / 1e6:.1f} MB a step on the wire" if carried else ""
    print(f"{name:>16} on {network}: {done.step_s():.2f} s a step, loss {_loss(done):.4f}{sent}", flush=True)


def _loss(done: Outcome) -> float:
    """Of the last tenth of the steps."""
    losses = done.losses()
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def kill(folder: Path, data: Path, steps: int) -> int:
    """Four stages, two peers in the third, one of them killed in the middle of a step; it comes back later."""
    counts = [1, 1, 2, 1]
    with peers(folder, data, counts, WAN, steps, "int8") as started:
        started.until(lambda: started.steps(2, 1) >= steps // 3, 60.0 * steps)
        started.kill(2, 1)
        started.until(lambda: bool(started.outcome().events("rerouted")), 60.0)
        started.start(2, 1)
        done = started.finish(60.0 * steps, without=started.folders[2][1])
    with peers(folder, data, [1, 1, 1, 1], LOOPBACK, steps, "fp32") as started:
        plain = started.finish(60.0 * steps)
    begun = {
        len([r for r in journal if r["kind"] == "start"])
        for i, stage in enumerate(done.journals)
        for j, journal in enumerate(stage)
        if (i, j) != (2, 1)
    }
    once = all([r["step"] for r in done.steps(i)] == list(range(1, steps + 1)) for i in range(4))
    moved = done.events("rerouted")
    stall = max(done.gaps())
    print("\n".join(sorted({r["text"] for kind in ("rerouted", "joined", "went_back") for r in done.events(kind)})))
    gap = _loss(done) / _loss(plain) - 1
    print(
        f"median step {done.step_s():.2f} s, longest {stall:.2f} s; loss {_loss(done):.4f} against {_loss(plain):.4f}"
    )
    return _verdicts(
        (begun == {1} and once and bool(moved) and not done.events("went_back"), "no restart, each step taken once"),
        (
            bool(done.events("joined")) and len(done.digests(2)) == 1,
            "the peer came back, and both have the same weights",
        ),
        (gap <= BAR_LOSS, f"loss {gap:+.2%} (bar {BAR_LOSS:.0%})"),
    )


def simulated(folder: Path, steps: int) -> int:
    """8B over four peers: FLOPs of a stage, 6 x 1.75e9 a token; bytes of a token by the way it is sent."""
    tokens = 1024
    flops = 6 * 1.75e9 * tokens
    verdicts = []
    print("activations      TFLOP/s  compute   message   at 100 Mbit/s   loopback      WAN     ratio")
    for name, width, tflops, count in CASES:
        size = tokens * (width + 2 * -(-width // 128))
        compute_s = flops / tflops / 1e12
        command = [sys.executable, "-m", "benchmarks.fleet.stage_sim", "--steps", str(steps), "--bytes", str(size)]
        command += [
            "--micro-batches",
            str(count),
            "--forward-s",
            f"{compute_s / 3}",
            "--backward-s",
            f"{compute_s * 2 / 3}",
        ]
        took = []
        for network in (LOOPBACK, WAN):
            shutil.rmtree(folder / "run", ignore_errors=True)
            (folder / "run").mkdir()
            with Peers(command, [1, 1, 1, 1], folder / "run", network) as started:
                took.append(started.finish(1200.0).step_s())
        ratio = took[1] / took[0]
        print(
            f"{name:>14}  {tflops:>7}  {compute_s * 1e3:>4.0f} ms  {size / 1e6:>5.2f} MB  {size * 8e-5:>10.0f} ms"
            f"  {took[0]:>8.2f} s  {took[1]:>6.2f} s  {ratio:>7.2f}x",
            flush=True,
        )
        verdicts.append((ratio <= BAR_TIME, f"{name}, {tflops} TFLOP/s: {ratio:.2f}x (bar {BAR_TIME}x)"))
    return _verdicts(*verdicts)


def _verdicts(*found: tuple[bool, str]) -> int:
    for good, text in found:
        print(f"{'PASS' if good else 'MISS'}  {text}")
    return 0 if all(good for good, _ in found) else 1
