"""Text out of a model: one token after the other, each from the whole context again.

There is no cache of keys and values: this is for a look at a run, not for serving, and the plain way has no state
that could differ from training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.errors import NumericsError, UsageError
from shoal.model.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    ids: list[int],
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    eos_id: int | None = None,
    vocab_size: int | None = None,
) -> list[int]:
    """The tokens that follow `ids`, without them; ends before `eos_id`. Temperature 0 always takes the likeliest.

    `vocab_size` is the tokenizer's: the model may have more rows (rounded up), which mean nothing.
    """
    if not ids:
        raise UsageError("there is nothing to go on from: give a prompt of at least one token.")
    if worst := [i for i in ids if not 0 <= i < model.shape.vocab_size]:
        raise UsageError(
            f"the prompt has token {worst[0]}, but the model knows {model.shape.vocab_size}: use its own tokenizer."
        )
    device = next(model.parameters()).device
    generator = torch.Generator("cpu").manual_seed(seed)
    whole = list(ids)
    for _ in range(max_new_tokens):
        context = torch.tensor([whole[-model.shape.max_seq_len :]], device=device)  # [1, seq]
        logits = model(context)[0, -1, :vocab_size].float().cpu()
        if not logits.isfinite().all():
            raise NumericsError(
                f"after {len(whole)} tokens its logits are not finite: the weights are damaged or have diverged."
            )
        token = _pick(logits, temperature, top_k, generator)
        if token == eos_id:
            break
        whole.append(token)
    return whole[len(ids) :]


def _pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token from the logits [vocab]; drawn on the CPU, so that a seed gives the same text on every device."""
    if temperature <= 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
