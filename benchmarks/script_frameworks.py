"""Scripts in the styles of frameworks under `shoal run`: are the bits the same with the probe, what is it told of them,
how soon is a rank named that is killed or stopped, and does the script truly go on.

    python benchmarks/script_frameworks.py [--only plain,ddp] [--site FOLDER]

The scripts are in benchmarks/frameworks, unedited by Shoal. Frameworks are looked for in FOLDER: what `uv pip install
--target FOLDER --no-deps accelerate lightning lightning-utilities pytorch-lightning torchmetrics
deepspeed hjson msgpack py-cpuinfo einops ninja trl==1.16.0` put there. A row whose framework is not found says so and
counts as missed. The two of TRL are the scripts of its own package, on a tiny model and rows made on the spot.

Each row: without the probe, and with it (bit-equal files of weights? as many steps as were taken?); a rank is killed
once it has saved, and the run goes on (the same bits at the end, or how far off); a rank is stopped.
Bars: the same bits with the probe; all steps seen; both faults named within 10 s of a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
from tests.patience import Stopwatch  # noqa: E402

from shoal.journal.journal import records  # noqa: E402

SCRIPTS = Path(__file__).with_name("frameworks")
NAMED_S = 10.0


@dataclass(frozen=True)
class Style:
    script: str
    worlds: tuple[int, ...]
    checkpoints: str
    steps: int = 200
    a_step: int = 1  # of the loop's: steps of the script for each of the optimizer's
    of_trl: str = ""  # the rows that a script of TRL is given: its own words are others


STYLES = {
    "plain": Style("plain.py", (1,), "step-*.pt"),
    "ddp": Style("ddp.py", (2,), "step-*.pt"),
    "fsdp2": Style("fsdp2.py", (2,), "step-*"),
    "image with a scaler": Style("image.py", (1,), "step-*.pt"),
    "own op and safetensors": Style("own_op.py", (1,), "step-*"),
    "HF Trainer": Style("hf_trainer.py", (1, 2), "checkpoint-*", 40),
    "Accelerate": Style("accelerated.py", (1, 2), "step-*", a_step=2),
    "Lightning": Style("lit.py", (1,), "*.ckpt"),
    "DeepSpeed ZeRO 2": Style("zero.py", (2,), "step-*"),
    "Horovod's style": Style("horovod_style.py", (2,), "step-*.pt"),
    "TRL sft": Style("trl/scripts/sft.py", (1,), "checkpoint-*", 24, of_trl="sft"),
    "TRL dpo": Style("trl/scripts/dpo.py", (1,), "checkpoint-*", 24, of_trl="dpo"),
}


class Trial:
    """`shoal run` of one script in a folder of its own."""

    def __init__(self, style: Style, world: int, folder: Path, name: str, site: str, *options: str) -> None:
        place = folder / name
        place.mkdir()
        self.style, self.out, self.log = style, place / "out", place / "log"
        self.journal = place / "runs" / name / "journal.jsonl"
        every = style.steps // 4
        option = "--resume_from_checkpoint" if style.of_trl else "--resume"
        resume = ["--resume", option + " {checkpoint}", "--checkpoints", f"{self.out}/{style.checkpoints}"]
        values = ["track.mlflow=false", "guard.backoff_s=0.01", "guard.on_hang=restart"]
        script = Path(site).resolve() / style.script if style.of_trl else SCRIPTS / style.script
        words = ["--name", name, "--processes", str(world), *resume, *values, *options, str(script)]
        own = ["--out", str(self.out), "--steps", str(style.steps), "--save", str(every)]
        own = of_trl(style, folder, self.out, every) if style.of_trl else own
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": site}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shoal", "run", *words, *own],
                cwd=place,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def ended(self) -> int:
        return self.process.wait()

    def told(self, *kinds: str) -> list[dict[str, Any]]:
        return [r for r in records(self.journal) if r["kind"] in kinds] if self.journal.exists() else []

    def weights(self) -> dict[str, torch.Tensor] | None:
        file = self.out / ("model.safetensors" if self.style.of_trl else "final.pt")
        if not file.exists():
            return None
        return load_file(file) if self.style.of_trl else torch.load(file)

    def saved(self) -> bool:
        """A second checkpoint is begun, so that the first is whole."""
        return self.out.is_dir() and len(list(self.out.glob(self.style.checkpoints))) > 1

    def hit(self, number: int) -> float | None:
        """The last rank, once it has saved; when it was hit."""
        while self.process.poll() is None and not self.saved():
            time.sleep(0.01)
        ranks: dict[int, int] = {}
        for child in psutil.Process(self.process.pid).children() if self.process.poll() is None else []:
            try:
                ranks[int(child.environ()["RANK"])] = child.pid
            except (psutil.Error, KeyError):
                continue
        if not ranks:
            return None
        at = time.time()
        os.kill(ranks[max(ranks)], number)
        return at


def of_trl(style: Style, folder: Path, out: Path, every: int) -> list[str]:
    """A tiny Llama with a tokenizer of bytes, rows of text or of pairs, and the words that TRL's scripts take."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    model, data = folder / "tiny", folder / "rows"
    if not model.exists():
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        bytewise = Tokenizer(models.BPE({letter: i for i, letter in enumerate(["<end>", *letters])}, []))
        bytewise.pre_tokenizer, bytewise.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<end>", pad_token="<end>").save_pretrained(model)
        torch.manual_seed(2)
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=257, max_position_embeddings=64, eos_token_id=0, bos_token_id=0, **size)
        LlamaForCausalLM(config).save_pretrained(model)
        data.mkdir()
        pairs = [{"prompt": f"{i} and {i}: ", "chosen": f"{2 * i}", "rejected": f"{i}"} for i in range(64)]
        rows = pairs if style.of_trl == "dpo" else [{"text": f"{i} and {i} are {2 * i}"} for i in range(64)]
        (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", out, "--max_steps", style.steps]
    words += ["--save_steps", every, "--per_device_train_batch_size", 2, "--max_length", 32, "--bf16", "false"]
    words += ["--use_cpu", "true", "--report_to", "none", "--disable_tqdm", "true", "--learning_rate", "1e-3"]
    return list(map(str, words))


def spent_s() -> float:
    """CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tried(style: Style, world: int, folder: Path, site: str) -> dict[str, Any]:
    before = spent_s()
    bare = Trial(style, world, folder, "bare", site, "--no-probe")
    failed, bare_s = bare.ended(), spent_s() - before
    if failed:
        return {"error": bare.log.read_text().strip().splitlines()[-1][:160]}
    before = spent_s()
    probed = Trial(style, world, folder, "probed", site)
    code, probed_s = probed.ended(), spent_s() - before
    steps = probed.told("step")
    found: dict[str, Any] = {
        "same": code == 0 and same(bare.weights(), probed.weights()),
        "steps": (sum(int(r.get("steps", 1)) for r in steps), style.steps // style.a_step),
        "losses": sum(isinstance(r.get("loss"), float) for r in steps),
        "saves": len(probed.told("checkpoint")),
        "cpu_s": (bare_s, probed_s),
    }
    for name, number, kind in (("killed", signal.SIGKILL, "failure"), ("stopped", signal.SIGSTOP, "hang")):
        hit = Trial(style, world, folder, name, site)
        at = hit.hit(number)
        watch, spent = Stopwatch(), 0.0
        while at and hit.process.poll() is None and not hit.told(kind):
            time.sleep(0.05)
            spent = watch.quiet_s()
        code = hit.ended()
        first = next(iter(hit.told(kind)), None)
        found[name] = {
            "named_s": None if first is None or at is None else min(spent, first["t"] - at),
            "cause": None if first is None else first.get("cause", "stopped" if first.get("stopped") else "hangs"),
            "right": first is not None and first["rank"] == world - 1,
            "resumed": any(r.get("resumed_from") is not None or r.get("path") for r in hit.told("start")[1:]),
            "code": code,
            "off": distance(bare.weights(), hit.weights()),
        }
    return found


def same(one: dict[str, torch.Tensor] | None, other: dict[str, torch.Tensor] | None) -> bool:
    return distance(one, other) == 0.0


def distance(one: dict[str, torch.Tensor] | None, other: dict[str, torch.Tensor] | None) -> float | None:
    """0: to the bit."""
    if one is None or other is None or one.keys() != other.keys():
        return None
    if all(torch.equal(t, other[name]) for name, t in one.items()):
        return 0.0
    return max(float((t.double() - other[name].double()).abs().max()) for name, t in one.items())


def cost(found: dict[str, Any]) -> str:
    bare, probed = found["cpu_s"]
    return f"{bare:.1f} s of CPU, {probed:.1f} with the probe"


def words_of(fault: dict[str, Any]) -> str:
    named = "not named" if fault["named_s"] is None else f"{fault['named_s']:.1f} s, {fault['cause']}"
    named += "" if fault["right"] else " (another rank)"
    if fault["off"] is None:
        return f"{named}; no end (exit {fault['code']})"
    how = "goes on" if fault["resumed"] else "begins anew"
    off = f"off by {fault['off']:.1g}" if fault["off"] else "same bits"
    return f"{named}; {how}, {off}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of rows, with commas")
    parser.add_argument("--site", default="", help="a folder with the frameworks")
    parser.add_argument("--out", help="a file for all that was measured, as JSON")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else list(STYLES)
    missed, told = 0, {}
    for name in wanted:
        style = STYLES[name]
        for world in style.worlds:
            with tempfile.TemporaryDirectory() as folder:
                found = tried(style, world, Path(folder), args.site)
            told[f"{name} x{world}"] = found
            if "error" in found:
                missed += 1
                print(f"{name:<22} x{world}  did not run: {found['error']}", flush=True)
                continue
            faults = [found["killed"], found["stopped"]]
            late = any(f["named_s"] is None or f["named_s"] > NAMED_S or not f["right"] for f in faults)
            bad = not found["same"] or found["steps"][0] != found["steps"][1] or late
            missed += bad
            print(
                f"{name:<22} x{world}  {'same bits' if found['same'] else 'OTHER BITS'}  "
                f"{found['steps'][0]} of {found['steps'][1]} steps, {found['saves']} saves seen, "
                f"{cost(found)}\n"
                f"{'':<26}killed: {words_of(faults[0])}\n{'':<26}stopped: {words_of(faults[1])}",
                flush=True,
            )
    if args.out:
        Path(args.out).write_text(json.dumps(told, indent=1) + "\n")
    print(f"{missed} rows missed a bar: same bits, all steps seen, named within {NAMED_S:.0f} s")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
