"""Helpers of the preparing tests: small corpora, small tokenizers, and the command in a process of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from shoal.data.shards import TokenShards
from shoal.data.tokenizer import load_tokenizer

_PROSE = (
    "the whale, a white sea; old ship's deck 1851 captain said: “No!” and (then) they'll sail — 42 miles\tfurther. "
    "Ça été naïve 海は広い 🐳 don't I'M x=1\n y\n\n z"
)
WORDS = _PROSE.split(" ")

# The command line with units so small that a small corpus has many. Only the parent cuts units; workers are as ever.
SMALL_UNITS = (
    "import sys; import shoal.data.prepare.units as u; u.MIN_UNIT_BYTES = {unit_bytes}; "
    "import shoal.data.prepare.out_folder as f; f.LOCK_WAIT_S = 3; "
    "from shoal.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


def make_texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, longest))).strip() or "whale" for _ in range(count)]


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t}, ensure_ascii=bool(i % 2)) + "\n" for i, t in enumerate(texts)))
    return path


def read_texts(folder: Path) -> list[str]:
    """Every document of a data set, decoded."""
    shards = TokenShards.open(folder)
    tokenizer = load_tokenizer(folder)
    tokens, ends, _ = shards.read(0, shards.tokens)
    begins = [0, *ends.tolist()]
    documents = [tokens[lo:hi].tolist() for lo, hi in zip(begins, ends.tolist(), strict=False)]
    assert all(d[-1] == shards.eos_id for d in documents)
    return [tokenizer.decode(d[:-1]) for d in documents]


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file but the lock and the plan, which are for the command itself."""
    found = (p for p in sorted(folder.rglob("*")) if p.is_file() and ".prepare" not in p.parts)
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def small_bpe(kind: str = "gpt2", vocab_size: int = 600, added: Sequence[AddedToken] = ()) -> Tokenizer:
    """A BPE of one of the kinds that published models have, trained on a few made-up texts."""
    from shoal.data.word_ids import GPT2, GPT4, QWEN2

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(pattern: str) -> pre_tokenizers.PreTokenizer:
        from tokenizers import Regex

        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])

    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = {
        "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
        "smollm2": pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        "gpt2-split": split(GPT2),
        "llama3": split(GPT4),
        "qwen2": split(QWEN2),
        "metaspace": pre_tokenizers.Metaspace(),
        "other": split(r"\w+ \w+|\s+|\S+"),
    }[kind]
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.Metaspace() if kind == "metaspace" else decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=[] if kind == "metaspace" else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(make_texts(200, seed=7), trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def shoal(*arguments: object, unit_bytes: int | None = None, **options: Any) -> subprocess.Popen[str]:
    """`shoal …` started in a process of its own."""
    code = ["-m", "shoal"] if unit_bytes is None else ["-c", SMALL_UNITS.format(unit_bytes=unit_bytes)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    return subprocess.Popen([sys.executable, *code, *map(str, arguments)], env=env, text=True, **options)
