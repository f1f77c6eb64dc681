"""`shoal data tokenizer`: a byte-level BPE learned from text, in the format that every Hugging Face tool reads."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.data.inputs import expand
from shoal.data.prepare import told_to_stop
from shoal.data.prepare_folder import writing_to
from shoal.data.prepare_unit import document_hash, pieces
from shoal.data.problems import Problems
from shoal.data.progress import ProgressLine
from shoal.data.readers import documents
from shoal.data.tokenizer import TOKENIZER_FILE
from shoal.data.units import Reading, Unit, plan_units
from shoal.errors import DataError, UsageError

END = "<|endoftext|>"
MIN_VOCAB = 256 + 1  # every byte, and the end of a document
MAX_VOCAB = 1_000_000
_BATCH_CHARS = 1 << 20


def train_tokenizer(
    named: Sequence[str],
    out: str | os.PathLike[str],
    vocab_size: int,
    reading: Reading | None = None,
    format: str = "auto",
    skip_bad: bool = False,
    max_mb: float | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Learn from the named inputs, write `out` (a .json file, or a folder), say what came out."""
    if not MIN_VOCAB < vocab_size <= MAX_VOCAB:
        raise UsageError(
            f"--vocab-size {vocab_size} is no size for a byte-level BPE: it needs more than {MIN_VOCAB} (the bytes and "
            f"{END}) and at most {MAX_VOCAB:,}."
        )
    if max_mb is not None and max_mb <= 0:
        raise UsageError(f"--max-mb {max_mb} leaves no text to learn from.")
    reading = reading or Reading()
    problems = Problems(skip_bad)
    inputs, _ = expand(named, format, reading.split, leave_out=Path(out))
    units = plan_units(inputs, reading, problems)
    total_bytes = sum(u.size_bytes for u in units)
    share = 1.0 if max_mb is None else min(1.0, max_mb * 1e6 / max(total_bytes, 1))
    learner = _Learner(vocab_size)
    with told_to_stop("nothing was written"), ProgressLine("read text", total_bytes, quiet=quiet) as line:
        learner.learn(_texts(units, reading, problems, share, line), line)
    learned = learner.tokenizer.get_vocab_size()
    if learner.documents == 0:
        raise DataError(f"there are no documents in {', '.join(named)} to learn from.")
    if learned < vocab_size:
        line.say(f"the text gives only {learned:,} tokens where {vocab_size:,} were asked for; more text gives more")
    path = _write(learner.tokenizer, Path(out))
    return {
        "path": str(path),
        "vocab_size": learned,
        "documents": learner.documents,
        "text_bytes": learner.text_bytes,
        "bytes_per_token": learner.bytes_per_token(),
        "skipped": problems.to_json(),
    }


class _Learner:
    """Runs the library's trainer in a thread: merging takes minutes, and the main thread has to hear signals."""

    def __init__(self, vocab_size: int) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        self.tokenizer = Tokenizer(models.BPE())
        # GPT-2's expression: every reader of tokenizer.json knows it, and shoal.data.words makes it fast.
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self._trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        self.documents = 0
        self.text_bytes = 0
        self._probe = ""

    def learn(self, texts: Iterator[list[str]], line: ProgressLine) -> None:
        failed: list[BaseException] = []
        stop = threading.Event()

        def feed() -> Iterator[list[str]]:
            for batch in texts:
                if stop.is_set():
                    return
                self.documents += len(batch)
                self.text_bytes += sum(len(t.encode()) for t in batch)
                if len(self._probe) < _BATCH_CHARS:
                    self._probe += "".join(batch)[:_BATCH_CHARS]
                yield batch
            line.say(f"read {self.text_bytes / 1e6:.1f} MB of text; now merging pairs")

        def train() -> None:
            try:
                self.tokenizer.train_from_iterator(feed(), self._trainer)
            except BaseException as e:  # to be raised in the main thread
                failed.append(e)

        thread = threading.Thread(target=train, daemon=True)  # daemon: a stop does not wait for the merging to end
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.1)
        finally:
            stop.set()
        if failed:
            raise failed[0]

    def bytes_per_token(self) -> float:
        texts = pieces(self._probe)
        tokens = sum(len(e.ids) for e in self.tokenizer.encode_batch(texts))
        return sum(len(t.encode()) for t in texts) / max(tokens, 1)


def _texts(
    units: Sequence[Unit], reading: Reading, problems: Problems, share: float, line: ProgressLine
) -> Iterator[list[str]]:
    """Batches of texts; of each document all or nothing, by its hash, when only a share is wanted."""
    batch: list[str] = []
    chars = 0
    for unit in units:
        for piece in unit.pieces:
            for document in documents(piece, reading, problems, lambda n: line.add(n)):
                if share < 1 and document_hash(document) >= share * 2**64:
                    continue
                for text in pieces(document.text):
                    batch.append(text)
                    chars += len(text)
                    if chars >= _BATCH_CHARS:
                        yield batch
                        batch, chars = [], 0
    if batch:
        yield batch


def _write(tokenizer: Any, out: Path) -> Path:
    is_file = out.suffix == ".json"
    path = out if is_file else out / TOKENIZER_FILE
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        os.replace(temporary, path)
        if not is_file:
            # With it `transformers.AutoTokenizer.from_pretrained(out)` works.
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
            (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return path
