"""What the probe adds to a script: CPU time of steps with it and without it, in one process, block by block.

Blocks of steps take turns, with the probe's hooks in torch and with torch's own functions back in their place. Ratios
of real steps are told, and on a busy machine they scatter by more than what is looked for. So the same is done with a
step of next to nothing, where what the probe takes can be seen, and that is laid over the real step. What does not
depend on steps is told beside it: the thread that looks at the stacks once a second, and the start of the process. The
run is a real one, `shoal run` of this very file: rank 0, with its journal.

    python benchmarks/script_probe.py              bar: the probe and its thread take at most 1% of the CPU time
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BAR = 0.01
PAIRS, STEPS = 40, 12


def inside(out: str) -> None:
    import torch
    from torch.optim import optimizer as hooks

    from shoal.script import recorder

    torch.set_num_threads(1)
    torch.manual_seed(0)
    wide = [
        layer for _ in range(3) for layer in (torch.nn.Linear(384, 1536), torch.nn.GELU(), torch.nn.Linear(1536, 384))
    ]
    model = torch.nn.Sequential(*wide)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(32, 384)

    def steps(count: int) -> float:
        began = time.process_time()
        for _ in range(count):
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.process_time() - began) / count

    probed = torch.Tensor.backward
    kept = dict(hooks._global_optimizer_pre_hooks), dict(hooks._global_optimizer_post_hooks)
    assert hasattr(probed, "__wrapped__"), "run by `shoal run`, with the probe"

    def probe(on: bool) -> None:
        torch.Tensor.backward = probed if on else probed.__wrapped__
        for now, all_of_them in zip(
            (hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks), kept, strict=True
        ):
            now.clear()
            now.update(all_of_them if on else {})

    def pairs(count: int, among: int) -> list[tuple[float, float]]:
        """With the probe and without it; who is first changes."""
        steps(2 * count)
        found = []
        for pair in range(among):
            took: dict[bool, float] = {}
            for on in (True, False) if pair % 2 else (False, True):
                probe(on)
                took[on] = steps(count)
            found.append((took[True], took[False]))
        return found

    whole = pairs(STEPS, PAIRS)
    # A step of next to nothing, each with its own line in the journal: what the probe itself takes.
    recorder.LEAST_S = 0.0
    model, x = torch.nn.Linear(1, 1), torch.randn(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    least = pairs(300, PAIRS)
    # The thread of the pulse: `shoal-pulse`, by the kernel's count.
    import threading

    thread = next(t for t in threading.enumerate() if t.name == "shoal-pulse")
    ran_s = int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(
        Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    ) / os.sysconf("SC_CLK_TCK")
    Path(out).write_text(
        json.dumps(
            {
                "ratios": [on / off for on, off in whole],
                "step_s": statistics.median(off for _, off in whole),
                "probe_s": statistics.median(on - off for on, off in least),
                "thread": ran_s / age_s,
            }
        )
    )


def start_s() -> tuple[float, float]:
    """CPU seconds of a Python that does nothing, without and with the probe."""
    from shoal.script.file import PROBE

    def cpu_s(env: dict[str, str]) -> float:
        before = os.times()
        subprocess.run([sys.executable, "-c", "pass"], env={**os.environ, **env}, check=True)
        after = os.times()
        return (after.children_user + after.children_system) - (before.children_user + before.children_system)

    with tempfile.TemporaryDirectory() as folder:
        with_it = {"PYTHONPATH": str(PROBE), "SHOAL_SCRIPT": folder, "SHOAL_PROBE_OF": str(os.getpid()), "RANK": "0"}
        return (
            statistics.median(cpu_s({}) for _ in range(7)),
            statistics.median(cpu_s(with_it) for _ in range(7)),
        )


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        words = ["run", "--workspace", folder, "track.mlflow=false", "guard.restarts=0", __file__, "--inside", str(out)]
        subprocess.run([sys.executable, "-m", "shoal", *words], check=True, stdout=subprocess.DEVNULL)
        found = json.loads(out.read_text())
    ratio = statistics.median(found["ratios"])
    low, high = (sorted(found["ratios"])[int(q * (PAIRS - 1))] for q in (0.25, 0.75))
    bare, probed = start_s()
    share = found["probe_s"] / found["step_s"] + found["thread"]
    print(f"a step without the probe      {found['step_s'] * 1e3:8.2f} ms of CPU time")
    print(
        f"steps with it / without it    {ratio:8.4f}  (median of {PAIRS} pairs; half of them {low:.4f} to {high:.4f})"
    )
    of_step = found["probe_s"] / found["step_s"]
    print(f"the probe in a step           {found['probe_s'] * 1e6:8.1f} µs: {of_step:.4%} of it")
    print(f"the thread of the pulse       {found['thread']:8.4%} of a core")
    print(f"both                          {share:8.4%}  bar {BAR:.0%}: {'met' if share <= BAR else 'MISSED'}")
    print(f"start of a process            {probed - bare:8.3f} s of CPU time more, once")
    return 0 if share <= BAR else 1


if __name__ == "__main__":
    sys.exit(inside(sys.argv[2]) if sys.argv[1:2] == ["--inside"] else main())
