"""Packs what a GPU machine without a network lacks: Shoal's packages for its Python, tests' packages, and DeepSpeed.

    python scripts/gpu_packages.py [--python 3.12]        # writes .cache/gpu/packages.tar.xz
    there: mkdir /tmp/packages && tar -xf .cache/gpu/packages.tar.xz -C /tmp/packages
           export PYTHONPATH=/tmp/packages:$PWD/src:$PWD

By the versions and hashes of requirements.lock and scripts/deepspeed.lock, for Linux on x86_64. Left out is what such a
machine has: torch, numpy, transformers with its tokenizers and safetensors. No operator of DeepSpeed is built.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / ".cache" / "gpu" / "packages.tar.xz"
NAMES = [
    "annotated-types",
    "hypothesis",
    "iniconfig",
    "markdown-it-py",
    "mdurl",
    "msgpack",
    "packaging",
    "pluggy",
    "psutil",
    "pydantic",
    "pydantic-core",
    "pygments",
    "pytest",
    "pytest-timeout",
    "pyyaml",
    "rich",
    "sortedcontainers",
    "tqdm",
    "typing-extensions",
    "typing-inspection",
    "xxhash",
    "zstandard",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="of that machine (3.12)")
    python = parser.parse_args().python
    fetch = subprocess.run([sys.executable, ROOT / "scripts/fetch_deepspeed.py"], stdout=subprocess.PIPE, text=True)
    fetch.check_returncode()
    with tempfile.TemporaryDirectory() as at:
        lock = Path(at) / "lock.txt"
        lock.write_text("\n".join(_of(NAMES, (ROOT / "requirements.lock").read_text())))
        folder = Path(at) / "packages"
        platform = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28", "--only-binary", ":all:"]
        install = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--no-deps", *platform]
        subprocess.run([*install, "--require-hashes", "--target", str(folder), "-r", str(lock)], check=True)
        OUT.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(OUT, "w:xz") as tar:
            for part in (Path(fetch.stdout.splitlines()[-1]), folder):
                for file in sorted(part.iterdir()):
                    tar.add(file, file.name, filter=lambda f: None if "__pycache__" in f.name else f)
    print(f"{OUT}: {OUT.stat().st_size / 2**20:.1f} MiB")


def _of(names: list[str], lock: str) -> list[str]:
    """Their entries in a lock file, with the hashes."""
    found = {m[1]: m[0] for m in re.finditer(r"^([\w.-]+)==[^\n]*(?:(?<=\\)\n[^\n]*)*", lock, re.MULTILINE)}
    return [found[name] for name in names]


if __name__ == "__main__":
    main()
