"""Random folders and random exports, held against transformers: the logits are equal, or Shoal refuses in a sentence.

  python -m tests.model.against_transformers --configs 1000 --seed 1          (of each family; --family for one)
  python -m tests.model.against_transformers --exports 500 --seed 1

The same seed draws the same cases. A table is printed, and every case that is neither equal nor refused, with the
config that shows it; then the command ends with 1. What counts besides: of the configs that stay within the claimed
support and that transformers computes, how many Shoal takes. Who refuses everything would never differ.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.model.families import logits, opened  # first: it tells transformers to be quiet

import torch  # isort: skip
import transformers
from safetensors.torch import save_file

from shoal.errors import ShoalError
from shoal.model.decoder import Decoder
from shoal.model.hf import load_shape, load_weights, save_folder
from shoal.spec.balancing import holds_bias
from shoal.spec.families import FAMILIES, Family
from tests.model.random_folders import drawn, run_of

# Absolute, where logits spread by about one. A state space of random weights loses digits in either: transformers is
# apart from itself by 2e-5 with chunks of 8 and of 256 tokens.
DENSE_APART, EXPERTS_APART, STATES_APART = 1e-5, 1e-4, 5e-5
TOKENS = torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(3))
EQUAL, BOTH, OURS, THEIRS, DIFFERENT, CRASH = (
    "equal", "both refuse", "Shoal refuses", "only Shoal computes", "DIFFERENT", "CRASH",
)  # fmt: skip
WRONG = (DIFFERENT, CRASH)
MOST_LAYERS = 64  # that transformers is asked to build


@dataclass(frozen=True)
class Case:
    family: str
    about: Any  # what was drawn
    inside: bool  # within what Shoal claims to support
    outcome: str
    said: str = ""


def config_case(family: str, rng: Random, folder: Path) -> Case:
    config, inside = drawn(family, rng)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(rng.randrange(1 << 30))
    theirs, why = _theirs(folder)
    if theirs is None and (folder / "model.safetensors").exists():
        (folder / "model.safetensors").unlink()
    try:
        shape = load_shape(folder)
        if theirs is None:
            return Case(family, config, inside, THEIRS, why)
        with torch.device("meta"):
            model = Decoder(shape)
        model.to_empty(device="cpu")
        load_weights(model, folder)
        with torch.no_grad():
            found = model(TOKENS)
    except ShoalError as e:
        return Case(family, config, inside, OURS if theirs is not None else BOTH, str(e))
    except Exception as e:
        return Case(family, config, inside, CRASH, repr(e))
    return Case(family, config, inside, *_compared(found, theirs, FAMILIES[family]))


def _theirs(folder: Path) -> tuple[torch.Tensor | None, str]:
    """What transformers computes from the config and random weights, which it leaves in the folder."""
    layers = json.loads((folder / "config.json").read_text()).get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        return None, "transformers would build layers until the memory is full"
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                centred = FAMILIES[config.model_type].centred_norms
                one = 1.0 if parameter.ndim == 1 and "norm" in name and not centred else 0.0
                parameter.normal_(one, 0.2)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.2)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        state = {n: t.contiguous() for n, t in model.state_dict().items() if n not in tied}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return logits(model, TOKENS), ""
    except Exception as e:  # whatever a wrong config makes of it
        return None, repr(e)


def _compared(found: torch.Tensor, expected: torch.Tensor, family: Family) -> tuple[str, str]:
    if not expected.isfinite().all():
        return THEIRS, "transformers computes NaN"
    spread = max(1.0, float(expected.std()))
    apart = float((found - expected).abs().max()) / spread
    most = EXPERTS_APART if family.experts else STATES_APART if family.mamba else DENSE_APART
    return (EQUAL, "") if apart <= most else (DIFFERENT, f"apart by {apart:.3g}")


def export_case(rng: Random, folder: Path) -> Case:
    """A model as a run file states it: what may be trained is exported and opened again."""
    shutil.rmtree(folder, ignore_errors=True)
    drawn_run = run_of(rng)
    family = drawn_run.family
    try:
        shape = drawn_run.shape()
    except ShoalError as e:
        return Case(family, drawn_run.model, True, OURS, str(e))
    try:
        torch.manual_seed(rng.randrange(1 << 30))
        model = Decoder(shape)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if name.endswith("ffn.bias"):
                    tensor.normal_(0.0, 0.2 if holds_bias(family) else 0.0)
                elif not name.endswith("ffn.excess"):
                    one = name.endswith("norm.weight") and not shape.about.centred_norms
                    tensor.normal_(float(one), 0.2)
            model.eval()
            found = model(TOKENS)
        save_folder(folder, shape, model.state_dict())
        expected = logits(opened(folder), TOKENS)
    except Exception as e:
        return Case(family, drawn_run.model, True, CRASH, repr(e))
    return Case(family, drawn_run.model, True, *_compared(found, expected, FAMILIES[family]))


def cases(families: list[str], configs: int, exports: int, seed: int) -> Iterator[Case]:
    """Case n of a family is the same whatever else is drawn."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as there, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            for family in families:
                for n in range(configs):
                    yield config_case(family, Random(f"{seed}/{family}/{n}"), Path(there) / "hf")
            for n in range(exports):
                yield export_case(Random(f"{seed}/export/{n}"), Path(there) / "hf")
        finally:
            logging.disable(logging.NOTSET)


def taken(found: list[Case]) -> float:
    """Of those within the claimed support that transformers computes, the share that Shoal computes too."""
    computed = [case for case in found if case.inside and case.outcome in (EQUAL, OURS, DIFFERENT, CRASH)]
    return sum(case.outcome != OURS for case in computed) / len(computed) if computed else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=0, help="of each family")
    parser.add_argument("--exports", type=int, default=0, help="random run files")
    parser.add_argument("--family", choices=list(FAMILIES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="after every 20 cases, for others")
    parser.add_argument("--refused", action="store_true", help="list what Shoal alone refuses, and how often")
    args = parser.parse_args()
    families = [args.family] if args.family else list(FAMILIES)
    print(f"| of | cases | {EQUAL} | {OURS} | {BOTH} | {THEIRS} | {DIFFERENT} | {CRASH} | taken within support |")
    print("| --- |" + " ---: |" * 8)
    found: list[Case] = []
    for kind in [*(families if args.configs else ()), *(["exports"] if args.exports else ())]:
        exported = kind == "exports"
        those = []
        for case in cases([] if exported else [kind], args.configs, args.exports if exported else 0, args.seed):
            those.append(case)
            if args.pause and len(those) % 20 == 0:
                time.sleep(args.pause)
        counted = Counter(case.outcome for case in those)
        row = " | ".join(str(counted[name]) for name in (EQUAL, OURS, BOTH, THEIRS, DIFFERENT, CRASH))
        print(f"| {kind} | {len(those)} | {row} | {taken(those):.1%} |", flush=True)
        found += those
    for case in found:
        if case.outcome in WRONG:
            print(f"{case.outcome} ({case.said}): {json.dumps(case.about)}")
    if args.refused:
        refused = [case for case in found if case.outcome == OURS]
        for why, count in Counter(case.said for case in refused).most_common(60):
            print(f"{count:6} {sum(case.inside for case in refused if case.said == why):6} {why}")
    return int(any(case.outcome in WRONG for case in found))


if __name__ == "__main__":
    sys.exit(main())
