"""The engine on a GPU: kernels beside their twins, and decode steps in graphs beside the model's own forward pass."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from shoal.generate.graphs import Graphed
from shoal.generate.pick import Chooser, pick
from shoal.generate.request import Sampling
from shoal.model.decoder import Decoder
from shoal.spec.model import Model
from shoal.spec.shape import shape_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

SMALL = {"vocab_size": 512, "dim": 256, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 384, "max_seq_len": 512}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"family": "qwen3", "head_dim": 128},
    "qwen2, tied": {"family": "qwen2", "tie_embeddings": True},
    "gemma3": {
        "family": "gemma3_text",
        "head_dim": 96,
        "sliding_window": 40,
        "full_attention_every": 2,
        "sliding_rope_theta": 1e4,
        "query_pre_attn_scalar": 64,
        "tie_embeddings": True,
    },
    "experts": {"family": "qwen3_moe", "head_dim": 64, "experts": {"count": 8, "top_k": 2, "ffn_dim": 128}},
    "latent": {
        "family": "deepseek_v3",
        "kv_heads": 4,
        "mla": {
            "kv_lora_rank": 64,
            "q_lora_rank": None,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        },
    },
}


def small(kind: str, dtype: torch.dtype) -> Decoder:
    model = Decoder(shape_of(Model.model_validate({**SMALL, **MODELS[kind]})))
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)  # so that tokens differ
    return model.to("cuda", dtype).requires_grad_(False).eval()


@pytest.mark.parametrize("check", ["products", "one_token", "many_tokens", "picks", "exactly"])
def test_every_kernel_gives_what_its_plain_twin_gives(check: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.kernels.compare_engine", check], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["equal"], done.stderr[-3000:]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_in_pieces_and_steps_in_graphs_are_the_models_own_forward_pass(kind: str, dtype: torch.dtype) -> None:
    model = small(kind, dtype)
    torch.manual_seed(1)
    texts = [torch.randint(0, 512, (n,)).tolist() for n in (300, 17, 65)]
    whole = [model(torch.tensor([text], device="cuda"))[0].float().log_softmax(-1) for text in texts]
    runner = Graphed(model, 5, 400)
    off = []
    with torch.no_grad():
        seats = []
        for text, wanted in zip(texts, whole, strict=True):
            seat = runner.admit(text, 4, "")
            assert seat is not None
            for begin in range(0, len(text) - 8, 128):
                part = text[begin : min(begin + 128, len(text) - 8)]
                logits = runner.prefill(seat, part, True).float().log_softmax(-1)
                off.append((logits - wanted[begin : begin + len(part)]).abs().mean())
            seats.append(seat)
        for i in range(8):
            for batch in ([0, 1, 2], [0]) if i == 7 else ([0, 1, 2],):
                before = [seat.length for seat in seats]
                logits = runner.decode([seats[b] for b in batch], [texts[b][len(texts[b]) - 8 + i] for b in batch])
                logits = logits.float().log_softmax(-1)
                off += [(logits[k] - whole[b][len(texts[b]) - 8 + i]).abs().mean() for k, b in enumerate(batch)]
                if i == 7 and len(batch) == 3:  # the last token once more, alone
                    for seat, length in zip(seats, before, strict=True):
                        seat.length = length
                    break
    worst = float(max(off))
    print(kind, dtype, worst)
    # What is said of an unrelated text is 2 apart; in bf16 routers and windows make the most of a digit.
    assert worst < (2e-4 if dtype == torch.float32 else 0.3)
    for seat in seats:
        runner.release(seat)
    assert runner.blocks.held == 0
    runner.close()


def test_tokens_that_stay_on_the_device_are_those_that_the_host_picks() -> None:
    model = small("llama", torch.float32)
    prompts = [torch.randint(0, 512, (n,)).tolist() for n in (40, 100, 7)]
    samplings = [Sampling(temperature=0.0), Sampling(seed=3, top_p=0.9), Sampling(seed=4, top_k=20, temperature=1.5)]
    runner, found = Graphed(model, 4, 400), [[], [], []]  # type: ignore[var-annotated]
    with torch.no_grad():
        seats, begun = [], []
        for prompt, sampling in zip(prompts, samplings, strict=True):
            seat = runner.admit(prompt, 40, "")
            assert seat is not None
            logits = runner.prefill(seat, prompt, False)
            begun.append(pick(logits, [Chooser(sampling, 512)])[0])
            seats.append(seat)
        before = None
        for i in range(30):
            given = begun if i == 0 else [None] * 3
            now = runner.draw(seats, given, samplings, [i + 1] * 3)
            if before is not None:
                for k, (token, _) in enumerate(before.read()):
                    found[k].append(token)
            before = now
        assert before is not None
        for k, (token, _) in enumerate(before.read()):
            found[k].append(token)
        again = runner.admit([*prompts[1], begun[1], *found[1]], 1, "")  # its blocks are known by what was picked
        assert again is not None
        assert again.cached == 128
        runner.close()
        for prompt, sampling, first, tokens in zip(prompts, samplings, begun, found, strict=True):
            chooser = Chooser(sampling, 512, answer=[first])
            for token in tokens:
                logits = model(torch.tensor([[*prompt, *chooser.answer]], device="cuda"))[0, -1:]
                wanted = pick(logits, [chooser])[0]
                assert token == wanted
                chooser.answer.append(wanted)
