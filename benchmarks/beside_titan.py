"""torchtitan beside Shoal on the ranks of one card, in one run and taking turns: tokens/s, ratio, exposed wait.

    python benchmarks/beside_titan.py [--meshes 1x1,2x1,4x1,2x2,8x1,4x2] [--size 170m] [--out FOLDER]
    python benchmarks/beside_titan.py --systems before,shoal --against OTHER --meshes 1x1 --size 1b

A mesh is dp_shard x tp (of tp alone torchtitan computes in float32: not compared). torchtitan 0.2.2 must be importable;
`--peers FOLDER` adds one. OTHER is another tree of Shoal, or a tarball of one (`git archive -o before.tgz COMMIT src`).
Each system's own training loop, in bf16 with float32 weights, AdamW and clipping, compiled, no recomputation, random
tokens of one file. All ranks of all systems start, compile and warm up; then a few steps of each in turn, again and
again (ABAB), so that drift counts against nobody. A ratio is that of the last system to another, the median over the
rounds. Exposed wait is what torch's profiler saw in a last turn, the mean of the ranks: the share of the time in which
kernels of NCCL ran and nothing else did, and that in which nothing ran.

Ranks share the card, under MPS where it is there, and send through sockets of the loopback: this compares what the
systems do beside the products, and says nothing of real links. No GPU: `--device cpu --size tiny --no-compile
--precision fp32` tries it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
from benchmarks.beside.asked import SIZES, Asked, make_data  # noqa: E402
from benchmarks.beside.system import MODULES, Ended, System, shares_gpus, start  # noqa: E402
from tests.gpu.mps import mps  # noqa: E402

WARM = 4  # steps, of all systems at once; then SETTLE of each alone
SETTLE = 2
NOT_LINKS = "Ranks that share a GPU send through the loopback: it says nothing of real links."
OWN_GPUS = "No two ranks share a GPU."


def measure(systems: Sequence[System], rounds: int, steps: int, traced: int, limit_s: float) -> list[dict[str, Any]]:
    """A row a system; what was measured before a trace that fails is not lost."""
    end = time.monotonic() + limit_s

    def turn(system: System, words: str) -> list[dict[str, Any]]:
        system.say(words)
        return system.answers(end - time.monotonic())

    for system in systems:
        ready = system.answers(end - time.monotonic())
        if source := ready[0]["shoal"]:
            print(f"      {system.name} is {source}", flush=True)
    for system in systems:
        system.say(f"go {WARM}")
    for system in systems:
        system.answers(end - time.monotonic())
    for system in systems:
        turn(system, f"go {SETTLE}")
    peaks: dict[str, float] = {}
    for _ in range(rounds):
        for system in systems:
            told = turn(system, f"go {steps}")
            system.seconds.append(max(t["s"] for t in told))
            peaks[system.name] = max(t.get("gb", 0.0) for t in told)
    rows = [
        {
            "system": system.name,
            "mesh": f"{system.asked.dp}x{system.asked.tp}",
            "tokens_s": round(steps * system.asked.tokens / median(system.seconds)),
            "ms": round(1e3 * median(system.seconds) / steps, 2),
            "rounds_s": [round(s, 4) for s in system.seconds],
            "gb": peaks[system.name],
        }
        for system in systems
    ]
    for row, system in zip(rows, systems, strict=True):
        if traced:
            try:
                told = turn(system, f"trace {traced}")
                for share in ("exposed", "idle", "sending"):
                    if all(share in t for t in told):
                        row[share] = round(mean(t[share] for t in told), 4)
                row["traced_ms"] = round(1e3 * max(t["s"] for t in told) / traced, 2)
            except Ended as e:
                row["no_trace"] = str(e)
    return rows


def ratio_of(first: System, second: System) -> float:
    """Of speeds, round by round."""
    return median(b / a for a, b in zip(first.seconds, second.seconds, strict=True))


def lines(rows: Sequence[dict[str, Any]], ratios: dict[str, float]) -> list[str]:
    said = []
    for row in rows:
        if "exposed" in row:
            waits = f"exposed {row['exposed']:6.1%}, idle {row['idle']:6.1%} (sending {row['sending']:.1%})"
        else:
            waits = f"no trace{': ' + row['no_trace'] if 'no_trace' in row else ''}"
        speed = f"{row['tokens_s']:>9,} tokens/s {row['ms']:>9.2f} ms {row['gb']:>6.1f} GB"
        said.append(f"{row['mesh']:<5} {row['system']:<11} {speed}  {waits}")
    return said + [f"      {names}: {ratio:.3f}" for names, ratio in ratios.items()]


def source_of(against: Path | None, place: Path) -> Path:
    """The folder to import the other Shoal from."""
    if against is None:
        raise SystemExit("`before` is another tree of Shoal: name it with --against.")
    if against.is_file():
        with tarfile.open(against) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
            archive.extractall(place)
        against = place
    for folder in (against / "src", against):
        if (folder / "shoal").is_dir():
            return folder.resolve()
    raise SystemExit(f"{against} has no src/shoal: --against takes a tree of Shoal, or a tarball of its src.")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="torchtitan,shoal", help="some of torchtitan, shoal, before (%(default)s)")
    parser.add_argument("--against", type=Path, help="the tree, or tarball, of `before`")
    parser.add_argument("--peers", type=Path, help="a folder with torchtitan")
    parser.add_argument("--meshes", default="1x1,2x1,4x1,2x2,8x1,4x2", help="dp_shard x tp (%(default)s)")
    parser.add_argument("--size", choices=[*SIZES], default="170m")
    parser.add_argument("--batch", type=int, default=0, help="windows of a data-parallel rank (the size's own)")
    parser.add_argument("--precision", choices=["bf16", "fp8", "fp32"], default="bf16", help="fp8: of Shoal alone")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--traced", type=int, default=2, help="steps of the traced turn; 0: none")
    parser.add_argument("--no-compile", action="store_true", help="of both")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one mesh (%(default)g)")
    parser.add_argument("--out", type=Path, help="a folder for beside.json, table.txt and the ranks' logs")
    args = parser.parse_args(argv)
    names = args.systems.split(",")
    if wrong := [name for name in names if name not in MODULES]:
        raise SystemExit(f"there is no system '{wrong[0]}': {', '.join(MODULES)}")
    if "torchtitan" in names and args.precision == "fp8":
        raise SystemExit("fp8 is compared between trees of Shoal: --systems shoal,before")
    if args.device == "cuda" and not torch.cuda.device_count():
        print("torch sees no GPU here: nothing to compare (--device cpu tries the script).")
        return 0
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-beside-")))
        sources = dict.fromkeys(names, ROOT / "src")
        if "before" in names:
            sources["before"] = source_of(args.against, place / "before")
        daemon = stack.enter_context(mps()) if args.device == "cuda" else None
        how = ("under MPS" if daemon.env else f"without MPS: {daemon.why_not}") if daemon else "on a processor"
        path = os.pathsep.join(str(p) for p in (args.peers and args.peers.resolve(), os.environ.get("PYTHONPATH")) if p)
        meshes = [tuple(map(int, mesh.split("x"))) for mesh in args.meshes.split(",")]
        links = NOT_LINKS if any(shares_gpus(dp * tp, args.device) for dp, tp in meshes) else OWN_GPUS
        said = [f"{args.size}, {args.precision}{'' if args.no_compile else ', compiled'}, {how}. {links}"]
        print(said[0], flush=True)
        data = make_data(place / "data", SIZES[args.size])
        all_rows: list[dict[str, Any]] = []
        failed = 0
        for dp, tp in meshes:
            mesh = f"{dp}x{tp}"
            threads = max(1, len(os.sched_getaffinity(0)) // (dp * tp * len(names)))
            env = {**(daemon.env if daemon else {}), "PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
            began = time.monotonic()
            systems: list[System] = []
            try:
                for name in names:
                    own = place / mesh / name
                    how_asked = (args.device, args.precision, not args.no_compile, str(own), str(data), args.batch)
                    systems.append(start(name, Asked(args.size, dp, tp, *how_asked), env, sources[name]))
                rows = measure(systems, args.rounds, args.steps, args.traced, args.limit)
                last = systems[-1]
                ratios = {f"{last.name} of {s.name}": ratio_of(last, s) for s in systems[:-1]}
                told = lines(rows, ratios)
                all_rows += [{**row, "ratios": ratios if row["system"] == last.name else {}} for row in rows]
            except Ended as e:
                failed += 1
                told = [f"{mesh:<5} FAILED {e}"]
                all_rows.append({"mesh": mesh, "failed": str(e)})
            finally:
                for system in systems:
                    system.end()
            told[-1] += f"  [{time.monotonic() - began:.0f} s]"
            print("\n".join(told), flush=True)
            said += told
            if args.out:
                _write(args.out, place / mesh, {"how": said[0], "rows": all_rows}, said)
    return int(failed > 0)


def _write(out: Path, mesh: Path, told: dict[str, Any], said: Sequence[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "beside.json").write_text(json.dumps(told, indent=1))
    (out / "table.txt").write_text("\n".join(said) + "\n")
    for log in mesh.rglob("rank-*.log"):
        shutil.copy(log, out / f"{mesh.name}-{log.parent.name}-{log.name}")


if __name__ == "__main__":
    sys.exit(main())
