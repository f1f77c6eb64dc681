"""Small Hugging Face folders with tokenizers of every kind, random weights, and chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from shoal.model.decoder import Decoder
from shoal.model.hf import save_folder
from shoal.spec.model import Model
from shoal.spec.shape import shape_of

LETTERS = '{}[]:,.-+0123456789"\\abcdefghijklmnopqrstuvwxyzEAB TZ_#@$éößü日本'
MARKS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def byte_level() -> Any:
    """As GPT-2, Llama 3, Qwen and SmolLM have it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    merges = [('"', ":"), ("Ġ", '"'), ("{", '"'), ("t", "r"), ("tr", "ue"), ("u", "e"), ("Ã", "©"), ('"', ",")]
    merges.sort(key=lambda pair: len(pair[0] + pair[1]))
    for one, other in merges:
        vocab[one + other] = len(vocab)
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS[1:]])
    made.add_tokens(["null, ", "true"])
    return made


def byte_fallback() -> Any:
    """As SentencePiece models are written by transformers: Llama 2, Mistral, Gemma."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pieces = [*MARKS[:3], *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS.replace(" ", ""), "▁{", "▁a", "▁▁"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    made = Tokenizer(models.BPE(vocab, [("▁", "{"), ("▁", "a"), ("▁", "▁")], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return made


def metaspace() -> Any:
    """Unigram, as T5 and XLNet have it: without bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = [(piece, -float(i)) for i, piece in enumerate([*MARKS[:3], "▁", *LETTERS.replace(" ", ""), "▁{", '":'])]
    made = Tokenizer(models.Unigram(vocab, 0, False))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return made


KINDS = {"byte-level": byte_level, "byte-fallback": byte_fallback, "metaspace": metaspace}


def folder(where: Path, kind: str = "byte-level", template: str | None = CHATML, context: int = 512) -> Path:
    """One that Shoal opens. The model has more rows than the tokenizer has tokens."""
    library = KINDS[kind]()
    rows = library.get_vocab_size() + 7
    shape = shape_of(Model(vocab_size=rows, dim=32, layers=2, heads=2, ffn_dim=48, max_seq_len=context, init_std=0.2))
    model = Decoder(shape)
    model.init_weights(3)
    save_folder(where, shape, dict(model.state_dict()))
    (where / "tokenizer.json").write_text(library.to_str())
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if template is not None:
        said["chat_template"] = template
    (where / "tokenizer_config.json").write_text(json.dumps(said))
    return where


def random_model(rows: int, context: int = 1024) -> Decoder:
    """Its logits are nearly alike: what it says is decided by the draws."""
    shape = shape_of(Model(vocab_size=rows, dim=16, layers=1, heads=2, ffn_dim=16, max_seq_len=context))
    model = Decoder(shape)
    model.init_weights(5)
    with torch.no_grad():
        model.norm.weight.mul_(0.1)
    return model.eval()
