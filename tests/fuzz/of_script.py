"""Somebody's script: its file, the checkpoints that it has left, and the run file that says that it is one."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path
from random import Random

from tests.fuzz.raw_bytes import damaged
from tests.fuzz.reader import Finding, Folder, Target, objection, reader
from tests.fuzz.samples import file_target, one_file_of


def archive(packed: bool = False) -> bytes:
    """As torch writes one; or one that unpacks to much more."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as file:
        file.writestr("model/data.pkl", bytes(4000))
        file.writestr("model/data/0", bytes(1 << 20) if packed else bytes(range(256)) * 4)
        file.writestr("model/version", b"3\n")
    return made.getvalue()


def tensors() -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(16)


@reader("script-checkpoint", "script.whole", quick=300, share=100)
def script_checkpoint(folder: Path) -> Target:
    """Whole, or a reason in words; never an exception, and never more memory than a piece of it."""
    from shoal.script.whole import problem

    index = json.dumps({"metadata": {}, "weight_map": {"w": "model.safetensors", "v": "optimizer.pt"}}).encode()
    good = Folder({"optimizer.pt": archive(), "model.safetensors": tensors(), "model.safetensors.index.json": index})
    good["rng.pth"] = archive(packed=True)
    number = iter(range(1 << 62))

    def generate(rng: Random) -> Folder:
        case = Folder(good)
        if rng.random() < 0.8:
            del case["rng.pth"]
        return one_file_of(case, ("model.safetensors.index.json",), rng)

    def look(case: Folder) -> None:
        into = case.write(folder / str(next(number)))
        for path in (into, *(into / name for name in case)):
            said = problem(path)
            if said is not None and (wrong := objection(ValueError(said))):
                raise Finding(wrong)
            path.unlink() if path.is_file() else None

    return Target(generate, look)


@reader("script-file", "script.file", "script.horovod.needed", quick=200, share=50)
def script_file(folder: Path) -> Target:
    """Python, or one sentence; nothing of it is run."""
    from shoal.errors import SpecError
    from shoal.script.file import digest, look_at
    from shoal.script.horovod.needed import needed

    texts = [b"import torch\nfor step in range(3):\n    print(f'{step:>3}')\n", b"#!/bin/sh\nexec python $1\n"]
    texts += [b"# -*- coding: utf-16 -*-\n", b"def f(:\n", b"x = " + b"(" * 300 + b"\n", b"\xef\xbb\xbfprint(1)\n"]
    texts.append(b"raise SystemExit('it was run')\n")
    texts.append(
        b"try:\n    import horovod.torch as hvd\nexcept (ImportError, OSError):\n    from horovod import torch\n"
    )

    def read(path: Path) -> None:
        digest(path)
        needed(path, "")
        look_at(path)

    def generate(rng: Random) -> bytes:
        text = rng.choice(texts)
        return text if rng.random() < 0.1 else damaged(rng, text)

    return file_target(folder / "train.py", generate, read, (SpecError,))


@reader("adopted-script", "adopt.project", "adopt.patch", quick=12, share=10)
def adopted_script(folder: Path) -> Target:
    """Findings, and a patch that compiles, or one sentence; nothing of it is run."""
    from shoal.adopt.doctor import examine
    from shoal.adopt.patch import patch, write
    from shoal.errors import SpecError

    scripts = Path(__file__).parents[1] / "adopt" / "scripts"
    names = ("plain_loop.py", "gan.py", "pieces.py", "barrier_pair.py", "diffusion.py")
    texts = [(scripts / name).read_bytes() for name in names]

    def generate(rng: Random) -> bytes:
        lines = rng.choice(texts).splitlines(keepends=True)
        if rng.random() < 0.7:  # still Python, more often than not
            for _ in range(rng.randint(1, 6)):
                at = rng.randrange(len(lines))
                lines[at] = rng.choice((b"", lines[at] + lines[at], lines[rng.randrange(len(lines))]))
            return b"".join(lines)
        return damaged(rng, b"".join(lines))

    def read(path: Path) -> None:
        write(patch(examine(path)))

    return file_target(folder / "train.py", generate, read, (SpecError,))


@reader("script-run-file", "journal.rundir", quick=100, share=30)
def script_run_file(folder: Path) -> Target:
    """Whether a run is a script is asked of any run directory."""
    from shoal.journal.rundir import RunDir

    text = b"name: demo\nscript:\n  path: /x/train.py\nguard:\n  restarts: 3\n"
    run_dir = RunDir(folder / "demo")
    return file_target(run_dir.spec_file, lambda rng: damaged(rng, text), lambda _: run_dir.is_script)
