"""ZeRO 1, 2 and 3 as Shoal's engine beside Shoal's DDP: losses and gradient norms, step by step.

    python benchmarks/zero_beside_ddp.py [--steps 12]

Two processes on the CPU, float32, clipped at every step, whole windows and micro-batches. AdamW hides a constant factor
of a gradient, so its norm is compared too. DeepSpeed is fetched into a folder of its own the first time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = """\
name: run
model: {dim: 64, layers: 2, heads: 4, kv_heads: 2, ffn_dim: 128}
data: {train: data, seq_len: 64}
train: {batch: 8, clip: 0.5, precision: fp32, optimizer: {lr: 3e-3}}
resources: {processes: 2, device: cpu}
checkpoint: {every: 0}
guard: {spikes: off}
track: {mlflow: false}
"""
ROWS = {
    "ZeRO 1": ("engine.zero=1",),
    "ZeRO 2": ("engine.zero=2",),
    "ZeRO 3": ("engine.zero=3",),
    "ZeRO 2, 2 micro-batches": ("engine.zero=2", "mesh.micro_batch=2"),
    "ZeRO 3, 2 micro-batches": ("engine.zero=3", "mesh.micro_batch=2"),
    "ZeRO 3, offload": ("engine.zero=3", "engine.offload=cpu"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    fetch = subprocess.run([sys.executable, ROOT / "scripts/fetch_deepspeed.py"], stdout=subprocess.PIPE, text=True)
    fetch.check_returncode()
    environment = os.environ | {"PYTHONPATH": fetch.stdout.splitlines()[-1]}
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "run.yaml").write_text(RUN)
        text = ROOT / "examples/text/moby-dick.txt"
        shoal(here, environment, "data", "prepare", str(text), "--separator", r"\n\n\n", "--out", "data")

        def train(name: str, *asked: str) -> list[tuple[float, float]]:
            shoal(here, environment, "train", "run.yaml", f"name={name}", f"train.steps={steps}", *asked)
            lines = (here / "runs" / name / "journal.jsonl").read_text().splitlines()
            return [(r["loss"], r["grad_norm"]) for r in map(json.loads, lines) if r["kind"] == "step"]

        ddp = train("ddp", "mesh.dp_replicate=2", "mesh.dp_shard=1")
        print(f"{steps} steps on 2 processes; the largest relative difference from DDP's\n")
        print(f"{'':26} {'loss':>10} {'norm':>10}")
        for i, (name, asked) in enumerate(ROWS.items()):
            found = train(f"zero-{i}", "engine.name=deepspeed", *asked)
            apart = [max(abs(a[k] / b[k] - 1) for a, b in zip(found, ddp, strict=True)) for k in (0, 1)]
            print(f"{name:26} {apart[0]:10.1e} {apart[1]:10.1e}", flush=True)


def shoal(cwd: Path, environment: dict[str, str], *argv: str) -> None:
    done = subprocess.run([sys.executable, "-m", "shoal", *argv], cwd=cwd, env=environment, capture_output=True)
    if done.returncode:
        sys.exit(f"shoal {' '.join(argv)}: {done.stdout.decode()[-1500:]}{done.stderr.decode()[-1500:]}")


if __name__ == "__main__":
    main()
