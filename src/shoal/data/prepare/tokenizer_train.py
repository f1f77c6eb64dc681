"""`shoal data tokenizer`: a byte-level BPE learned from text, in the format that every Hugging Face tool reads.

The learning is done by a child process, `python -m shoal.data.prepare.tokenizer_train`: the library merges pairs for
minutes without a look at signals, and a process can be ended at any time where a thread cannot.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.data.prepare.bad_input import Problems
from shoal.data.prepare.child_errors import from_error, to_error
from shoal.data.prepare.data_set import pin_streams, told_to_stop
from shoal.data.prepare.inputs import expand
from shoal.data.prepare.memory_limit import check_limits
from shoal.data.prepare.out_folder import writing_to
from shoal.data.prepare.readers import documents
from shoal.data.prepare.unit import document_hash
from shoal.data.prepare.units import Reading, plan_units
from shoal.data.progress_line import ProgressLine
from shoal.data.tokenizer import PIECE_CHARS, TOKENIZER_FILE
from shoal.data.tokenizer_library import is_panic
from shoal.data.word_ids import BREAK
from shoal.errors import DataError, TransientError, UsageError
from shoal.held_signals import held_back

END = "<|endoftext|>"  # also the start (shoal.data.starts)
RESERVED = 16  # enough for the marks of a chat: roles, turns, tools, thoughts
BYTES = 256
MAX_VOCAB = 1_000_000
BATCH_CHARS = 1 << 20


@dataclass(frozen=True)
class Lesson:
    """What to learn from."""

    named: list[str]
    vocab_size: int
    reading: Reading = field(default_factory=Reading)
    format: str = "auto"
    skip_bad: bool = False
    max_mb: float | None = None
    reserved: int = RESERVED
    """Special tokens that stand for nothing yet, for whoever needs some later: the embedding has their rows."""
    quiet: bool = False


def train_tokenizer(lesson: Lesson, out: str | os.PathLike[str]) -> dict[str, Any]:
    """Learn, write `out` (a .json file, or a folder), say what came out."""
    if lesson.reserved < 0:
        raise UsageError(f"--reserved is {lesson.reserved}, but 0 is the least it can be.")
    least = BYTES + 1 + lesson.reserved
    if not least < lesson.vocab_size <= MAX_VOCAB:
        raise UsageError(
            f"--vocab-size {lesson.vocab_size} is no size for a byte-level BPE: it needs more than {least} (the bytes, "
            f"{END} and {lesson.reserved} reserved tokens) and at most {MAX_VOCAB:,}."
        )
    if lesson.max_mb is not None and lesson.max_mb <= 0:
        raise UsageError(f"--max-mb {lesson.max_mb} leaves no text to learn from.")
    check_limits(lesson.reading)
    learned = _in_a_child(lesson)
    path = _write(learned.pop("tokenizer"), Path(out))
    return {"path": str(path), **learned}


def _in_a_child(lesson: Lesson) -> dict[str, Any]:
    command = [sys.executable, "-m", "shoal.data.prepare.tokenizer_train"]
    with told_to_stop("nothing was written"), contextlib.ExitStack() as ending:
        with held_back(signal.SIGINT):  # Ctrl-C reaches the whole group; the parent ends this process
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            ending.callback(child.wait)
            ending.callback(child.kill)
        answer, _ = child.communicate(json.dumps(asdict(lesson)).encode())
    if not answer:
        how = "often that is the system running out of memory: learn from less with --max-mb"
        raise TransientError(f"learning ended early with code {child.returncode} ({how}).")
    message: dict[str, Any] = json.loads(answer)
    if "error" in message:
        raise to_error(message)
    return message


def learn(lesson: Lesson) -> dict[str, Any]:
    """The work itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    # Every digit by itself, as in SmolLM2, Qwen and Llama 2: a number is then read place by place, whatever its length;
    # groups of up to three begin at its left, so that 1234 and 234 share no token, and take 1,110 of the vocabulary.
    # Then GPT-2's expression: every reader of tokenizer.json knows both, and shoal.data.word_ids makes them fast.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    # Whoever reads it begins every text as a document of the training data begins.
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=lesson.vocab_size,
        special_tokens=[END, *(f"<|reserved_{i}|>" for i in range(lesson.reserved))],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    problems = Problems(lesson.skip_bad)
    text_bytes = 0
    probe = ""

    def batches() -> Iterator[list[str]]:
        nonlocal text_bytes, probe
        for batch in _texts(lesson, problems):
            text_bytes += sum(len(t.encode()) for t in batch)
            probe = probe or "".join(batch)
            yield batch
        if text_bytes and not lesson.quiet:
            print(f"read {text_bytes / 1e6:.1f} MB of text; now merging pairs", file=sys.stderr, flush=True)

    tokenizer.train_from_iterator(batches(), trainer)
    if not text_bytes:
        raise DataError(f"there are no documents in {', '.join(lesson.named)} to learn from.")
    size = tokenizer.get_vocab_size()
    if size < lesson.vocab_size and not lesson.quiet:
        asked = f"where {lesson.vocab_size:,} were asked for"
        print(f"the text gives only {size:,} tokens {asked}; more text gives more", file=sys.stderr, flush=True)
    tokens = sum(len(e.ids) for e in tokenizer.encode_batch(list(pieces(probe)), add_special_tokens=False))
    return {
        "vocab_size": size,
        "text_bytes": text_bytes,
        "bytes_per_token": len(probe.encode()) / tokens,
        "skipped": problems.to_json(),
        "tokenizer": tokenizer.to_str(pretty=True),
    }


def _texts(lesson: Lesson, problems: Problems) -> Iterator[list[str]]:
    """Batches of texts; of each document all or nothing, by its hash, when only a sample is wanted."""
    inputs, _ = expand(lesson.named, lesson.format, lesson.reading.split)
    reading = pin_streams(inputs, lesson.reading)
    units = plan_units(inputs, reading, problems)
    total_bytes = sum(u.size_bytes for u in units)
    share = 1.0 if lesson.max_mb is None else lesson.max_mb * 1e6 / max(total_bytes, 1)
    batch: list[str] = []
    chars = 0
    with ProgressLine("read text", total_bytes, quiet=lesson.quiet) as line:
        for piece in (piece for unit in units for piece in unit.pieces):
            for document in documents(piece, reading, problems, line.add):
                if share < 1 and document_hash(document) >= share * 2**64:
                    continue
                for text in pieces(document.text):
                    batch.append(text)
                    chars += len(text)
                    if chars >= BATCH_CHARS:
                        yield batch
                        batch, chars = [], 0
        if batch:
            yield batch


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces to learn from, cut before a space that follows a word where there is one. (Counts of pairs
    do not change by it, but for one at a cut within a word.)"""
    begin = 0
    while len(text) - begin > PIECE_CHARS:
        end = begin + PIECE_CHARS
        at = text.rfind(" ", begin + 1, end)
        while at > begin and not BREAK.match(text, at):
            at = text.rfind(" ", begin + 1, at)
        if at <= begin:
            at = max(text.rfind("\n", begin + 1, end), begin)
        if at <= begin:
            at = end
        yield text[begin:at]
        begin = at
    if text:
        yield text[begin:]


def _write(content: str, out: Path) -> Path:
    is_file = out.suffix == ".json"
    path = out if is_file else out / TOKENIZER_FILE
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, path)
        if not is_file:
            # With it `transformers.AutoTokenizer.from_pretrained(out)` works.
            marks = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
            config = {"tokenizer_class": "PreTrainedTokenizerFast", **marks}
            (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return path


def main() -> None:
    """The child: a lesson on stdin, the answer on stdout."""
    value = json.load(sys.stdin)
    try:
        answer = learn(Lesson(**{**value, "reading": Reading(**value["reading"])}))
    except Exception as e:
        answer = from_error(e)
    except BaseException as e:
        if not is_panic(e):
            raise
        answer = from_error(DataError(f"the tokenizers library gave up on the text ({e}); learn from other text."))
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
