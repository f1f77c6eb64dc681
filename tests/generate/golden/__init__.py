"""What transformers generates with the tiny models of `tests.model.families`: greedy tokens, log-probabilities.

    python -m tests.generate.golden [NAME…]        makes the files anew, in minutes

Of each family a file `NAME.npz`: the 64 tokens that follow each of 200 prompts, of the first 6 their
log-probabilities, and where the second best token was as good as the best. Models and prompts are made anew from seeds;
`weights`, the sum of the sizes of all numbers, tells another generator of random numbers from a wrong engine.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.model.families import CONFIGS, random_model

HERE = Path(__file__).parent
PROMPTS, NEW, VOCAB = 200, 64, 151
LENGTHS = (3, 8, 15, 24)  # of prompts; a few, as those of one length are asked together
TOLD = 6  # whose log-probabilities are kept
PLACES = 96  # which a model has
TIE = 1e-4  # nearer than this the second best is as good as the best: what follows may differ


@dataclass(frozen=True)
class Golden:
    prompts: list[list[int]]
    tokens: npt.NDArray[np.uint8]  # [prompts, new]
    logprobs: npt.NDArray[np.float64]  # [told, new]
    near: npt.NDArray[np.bool_]  # where the second best is nearer than TIE
    weights: float


def sizes_of(name: str) -> tuple[tuple[int, ...], int]:
    """Tokens of prompts, and of an answer. One family was made for 16 places, as what it does after them is of this
    length and of no other."""
    return (LENGTHS[:2], 8) if name == "llama-dynamic" else (LENGTHS, NEW)


def asked(name: str) -> list[list[int]]:
    drawn = np.random.default_rng(sorted(CONFIGS).index(name))
    sizes = drawn.choice(sizes_of(name)[0], PROMPTS)
    return [drawn.integers(3, VOCAB, size).tolist() for size in sizes]


def model_of(name: str) -> Any:
    model = random_model(name)
    if name != "llama-dynamic":
        model.config.max_position_embeddings = PLACES  # no angle depends on it
    return model


def weights_of(model: Any) -> float:
    return float(sum(p.detach().double().abs().sum() for p in model.parameters()))


@torch.no_grad()
def made(name: str) -> Golden:
    model, prompts, new = model_of(name), asked(name), sizes_of(name)[1]
    tokens, logprobs = np.zeros((PROMPTS, new), np.uint8), np.zeros((PROMPTS, new))
    near = np.zeros((PROMPTS, new), bool)
    by_length: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(i)
    for which in by_length.values():  # of one length: nothing is padded
        rows = torch.tensor([prompts[i] for i in which])
        told = model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        spread = torch.stack(told.logits, 1).double().log_softmax(-1)  # [rows, new, vocab]
        best = spread.topk(2, -1).values
        answers = told.sequences[:, rows.shape[1] :]
        tokens[which] = answers.numpy()
        logprobs[which] = spread.gather(-1, answers[..., None])[..., 0].numpy()
        near[which] = (best[..., 0] - best[..., 1] < TIE).numpy()
    return Golden(prompts, tokens, logprobs[:TOLD], near, weights_of(model))


def write(name: str) -> Path:
    found, file = made(name), HERE / f"{name}.npz"
    with tempfile.NamedTemporaryFile(dir=HERE, suffix=".new", delete=False) as new:
        # Log-probabilities in millionths, a tenth of what they are compared by.
        np.savez_compressed(
            new,
            tokens=found.tokens,
            logprobs=np.round(found.logprobs * 1e6).astype(np.int32),
            near=np.argwhere(found.near).astype(np.uint8),
            weights=found.weights,
        )
    os.chmod(new.name, 0o644)
    os.replace(new.name, file)
    return file


def kept(name: str) -> Golden:
    with np.load(HERE / f"{name}.npz") as file:
        near = np.zeros(file["tokens"].shape, bool)
        near[tuple(file["near"].T)] = True
        return Golden(asked(name), file["tokens"], file["logprobs"] / 1e6, near, float(file["weights"]))
