"""The format is what docs/reference/checkpoint.md says; neither Shoal nor torch is needed to look at it."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import torch
from tests.checkpoint.states import build, same_bits, tensors_of, train, whole
from tests.patience import limit
from tests.ranks import run_ranks
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from shoal import checkpoint

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "checkpoint.md"


def save_on_two_ranks(root: Path) -> dict[str, torch.Tensor]:
    def work(rank: int, world: int) -> dict[str, torch.Tensor]:
        model, optimizer = build("fsdp-2", seed=1)
        train(model, optimizer, steps=2)
        tensors = tensors_of(model, optimizer)
        saved = checkpoint.save(root, 100, tensors, {"position": 7}, term=3, piece_bytes=400, block_bytes=320)
        assert saved.bytes == sum(f.stat().st_size for f in (root / str(saved.name)).glob("*.safetensors"))
        return whole(tensors)

    return run_ranks(work, 2)[0]


def test_the_ten_lines_of_the_reference_read_a_checkpoint_without_shoal(tmp_path: Path) -> None:
    expected = save_on_two_ranks(tmp_path)
    code = re.search(r"```python\n(.*?)```", REFERENCE.read_text(), re.DOTALL)
    assert code is not None
    program = code[1].replace("runs/demo/checkpoints/step-00000100-term-3", str(tmp_path / "step-00000100-term-3"))
    assert str(tmp_path) in program
    statements = [line for line in program.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(statements) <= 10
    assert "shoal" not in program.replace(str(tmp_path), "")
    names: dict[str, dict[str, torch.Tensor]] = {}
    exec(program, names)
    assert same_bits(names["tensors"], expected)


def test_the_files_are_safetensors_and_all_their_bytes_have_a_checksum(tmp_path: Path) -> None:
    save_on_two_ranks(tmp_path)
    folder = tmp_path / "step-00000100-term-3"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(p.name for p in folder.iterdir()) == sorted(["manifest.json", *manifest["files"]])
    for name, file in manifest["files"].items():
        data, at = (folder / name).read_bytes(), file["header_bytes"]
        assert len(data) == file["bytes"]
        assert xxh3_128_hexdigest(data[:at]) == file["header_xxh3_128"]
        blocks = [data[i : i + manifest["block_bytes"]] for i in range(at, len(data), manifest["block_bytes"])]
        assert len(blocks) > 2, "several, so that this shows something"
        assert base64.b64decode(file["blocks"]) == b"".join(map(xxh3_128_digest, blocks))
    text = (folder / "manifest.json").read_bytes()
    assert manifest["xxh3_128"] == xxh3_128_hexdigest(text[: text.rindex(b",")])


def test_the_reference_names_every_member_of_the_manifest(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"w": torch.ones(2)}, {})
    manifest = json.loads((tmp_path / "step-00000001-term-0" / "manifest.json").read_text())
    named = set(re.findall(r"`(\w+)`", REFERENCE.read_text()))
    members = {*manifest, *manifest["files"]["rank-00000.safetensors"], *manifest["tensors"]["w"]}
    grid = manifest["grids"][0]
    assert members | {*grid, *grid["ranks"]} <= named


def test_finding_verifying_and_pruning_need_no_torch(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"w": torch.ones(2)}, {})
    program = (
        "import sys, pathlib; from shoal import checkpoint; root = pathlib.Path(sys.argv[1])\n"
        "found = checkpoint.newest(root, verify=True); checkpoint.prune(root, 1)\n"
        "assert found.step == 1 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=limit(60))
