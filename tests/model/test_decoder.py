"""What must hold of the decoder by itself: documents kept apart, the future unseen, the loss what it should be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shoal.errors import SpecError
from shoal.model import head
from shoal.model.decoder import Decoder
from shoal.spec.model import Model, RopeScaling
from shoal.spec.shape import Shape, shape_of
from tests.ranks import run_ranks

VOCAB = 97
SMALL = {"vocab_size": VOCAB, "dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "init_std": 0.2}
SHAPES = {
    "plain": shape_of(Model(**SMALL)),
    "window": shape_of(Model(**SMALL, sliding_window=5)),
    "window-after-full": shape_of(Model(**SMALL, sliding_window=5, full_attention_layers=2, tie_embeddings=True)),
    "qk-norm": shape_of(Model(**SMALL, qk_norm=True, qkv_bias=True, head_dim=12)),
}


def made(shape: Shape, seed: int = 0) -> Decoder:
    model = Decoder(shape)
    model.init_weights(seed)
    return model


def random_tokens(*size: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, size, generator=torch.Generator().manual_seed(1))


def packed(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """positions and documents [1, seq] of documents laid end to end."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)])[None]
    return positions, documents


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_a_packed_document_has_the_logits_it_has_alone(name: str) -> None:
    model, lengths = made(SHAPES[name]), [7, 1, 12, 10]
    tokens = random_tokens(1, sum(lengths))
    positions, documents = packed(lengths)
    together = model(tokens, positions, documents)
    start = 0
    for length in lengths:
        alone = model(tokens[:, start : start + length])
        torch.testing.assert_close(together[:, start : start + length], alone, rtol=0, atol=1e-5)
        start += length
    assert not torch.allclose(together, model(tokens), atol=1e-2)  # without the mask they do see each other


@torch.no_grad()
def test_rows_of_a_batch_may_be_packed_differently() -> None:
    model, tokens = made(SHAPES["window"]), random_tokens(2, 20)
    rows = [packed([20]), packed([4, 16])]
    positions, documents = (torch.cat(parts) for parts in zip(*rows, strict=True))
    both = model(tokens, positions, documents)
    for i, (p, d) in enumerate(rows):
        torch.testing.assert_close(both[i : i + 1], model(tokens[i : i + 1], p, d), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_a_later_token_changes_no_earlier_logits(name: str) -> None:
    model, tokens = made(SHAPES[name]), random_tokens(1, 24)
    changed = tokens.clone()
    changed[0, 15] = (changed[0, 15] + 1) % VOCAB
    for args in ((), packed([10, 14])):
        before, after = model(tokens, *args), model(changed, *args)
        assert torch.equal(before[:, :15], after[:, :15])
        assert not torch.allclose(before[:, 15], after[:, 15])


@torch.no_grad()
def test_a_window_of_w_tokens_sees_exactly_w_tokens() -> None:
    shape = shape_of(Model(**SMALL | {"layers": 1}, sliding_window=5))
    model, tokens = made(shape), random_tokens(1, 20)
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % VOCAB
    differs = (model(tokens) != model(changed)).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == [8, 9, 10, 11, 12]


@torch.no_grad()
def test_a_window_as_long_as_the_sequence_changes_nothing() -> None:
    tokens = random_tokens(1, 20)
    wide = shape_of(Model(**SMALL, sliding_window=20))
    assert torch.equal(made(wide)(tokens), made(SHAPES["plain"])(tokens))


@torch.no_grad()
def test_with_dynamic_rope_a_row_does_not_depend_on_the_others() -> None:
    shape = shape_of(Model(**SMALL, max_seq_len=8, rope_scaling=RopeScaling(kind="dynamic", factor=2.0)))
    model, tokens = made(shape), random_tokens(2, 20)
    positions = torch.stack([torch.arange(20), torch.arange(20) % 5])
    both = model(tokens, positions)
    assert torch.equal(both[1:], model(tokens[1:], positions[1:]))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk_rows", [128, 1000])
def test_the_loss_and_its_gradients_are_those_of_cross_entropy(
    tied: bool, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CPU_CHUNK_BYTES", chunk_rows * 4 * VOCAB)
    model = made(shape_of(Model(**SMALL, tie_embeddings=tied)))
    tokens, targets = (
        random_tokens(3, 100),
        random_tokens(3, 101)[:, 1:].clone(),
    )  # 300 rows: chunks of 128 do not divide
    targets[:, 10:30] = -100
    model(tokens, targets=targets).div(7).backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    plain = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    plain.div(7).backward()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, targets=targets), plain, rtol=1e-6, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_a_batch_without_targets_has_loss_zero_and_gradient_zero() -> None:
    model, tokens = made(SHAPES["plain"]), random_tokens(1, 8)
    loss = model(tokens, targets=torch.full((1, 8), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_bfloat16_autocast_stays_near_float32() -> None:
    model, tokens = made(SHAPES["qk-norm"]), random_tokens(2, 30)
    targets = tokens.roll(-1, 1)
    exact = model(tokens, targets=targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(tokens, targets=targets)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=2e-2, atol=0)
    assert rounded != exact  # it did compute in bfloat16
    rounded.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_compiled_block_gives_the_same_loss() -> None:
    def work(rank: int, world: int) -> None:
        model, tokens = made(SHAPES["window-after-full"]), random_tokens(2, 16)
        expected = model(tokens, targets=tokens)
        for block in model.blocks.values():
            block.compile(backend="aot_eager")  # the graph is what we ask about; inductor would take a minute
        torch.testing.assert_close(model(tokens, targets=tokens), expected, rtol=1e-6, atol=0)

    run_ranks(work, 1, timeout_s=120)  # elsewhere: a process that has compiled cannot fork ranks that compile


def test_the_parameters_are_those_that_the_shape_counts() -> None:
    for shape in SHAPES.values():
        with torch.device("meta"):
            model = Decoder(shape)
        assert sum(p.numel() for p in model.parameters()) == shape.params


def test_what_cannot_be_built_is_refused() -> None:
    for model, said in (
        (Model(**SMALL | {"kv_heads": 3}), "no multiple of model.kv_heads"),
        (Model(**SMALL, head_dim=7), "odd"),
    ):
        with pytest.raises(SpecError, match=said):
            Decoder(shape_of(model))
