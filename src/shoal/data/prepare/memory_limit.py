"""How much memory `shoal data prepare` may take, as a function of its settings; and what holds it to that.

    a process      BASE_BYTES + TOKENIZER_FACTOR * tokenizer.json + 2 * buffer_mb + DOCUMENT_FACTOR * max_document_mb
    all of them    workers processes like that, and this one, which holds PIECE_BYTES for each part of the input

Text, JSONL, gzip and zstandard are read so by construction. What pyarrow or `datasets` make room for is theirs to
decide: so the processes that use them have a limit, and a file that asks for more is refused by name. The size of a
shard has no part in it: shards are written as they are made. tests/data/test_memory.py holds the formula with files
that were made to break it.
"""

from __future__ import annotations

import contextlib
import resource
import sys

from shoal.data.prepare.units import Reading
from shoal.errors import UsageError

# Python, numpy, pyarrow and tokenizers as they are loaded, the ids of words (shoal.data.word_ids), a batch of
# documents.
BASE_BYTES = 256 << 20
# The library that reads a tokenizer.json, and what of it is kept in Python.
TOKENIZER_FACTOR = 24
# Of a document of n bytes: n as it was read; 4 n of text when one character in it is an emoji, and as much again while
# JSON is parsed or the text cut; up to one id of 4 bytes a byte, in parts and laid end to end; masks.
DOCUMENT_FACTOR = 20
PIECE_BYTES = 2048
# Shared libraries count as resident, but not as data.
LIBRARY_BYTES = 96 << 20

# For the environment of a child: one thread each, as the cores are taken by the other workers; and what pyarrow frees
# goes back to the system.
LEAN = {
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "USE_TORCH": "0",  # `datasets` imports it wherever it is installed, for nothing and for hundreds of megabytes
    "USE_TF": "0",
    "USE_JAX": "0",
}

FORMULA = (
    f"Memory: a process takes at most {BASE_BYTES >> 20} MiB + {TOKENIZER_FACTOR} times the size of tokenizer.json + "
    f"2 times --buffer-mb + {DOCUMENT_FACTOR} times --max-document-mb; --workers of them, and one that hands out work."
)
MOST_MB = 1024  # of a document: its ids and their places still fit into what libraries count with
MOST_BUFFER_MB = 1 << 14


def process_bytes(reading: Reading, tokenizer_bytes: int = 0) -> int:
    """The most that one process of a prepare may take."""
    document_bytes = max(reading.document_bytes, 16 << 20)  # plain text is cut at 16 MiB
    return BASE_BYTES + TOKENIZER_FACTOR * tokenizer_bytes + 2 * reading.buffer_bytes + DOCUMENT_FACTOR * document_bytes


def peak_bytes(reading: Reading, tokenizer_bytes: int, workers: int, pieces: int) -> int:
    """The most that a whole prepare may take, its workers included."""
    own = BASE_BYTES + TOKENIZER_FACTOR * tokenizer_bytes + PIECE_BYTES * pieces
    return own + workers * process_bytes(reading, tokenizer_bytes)


def hold_to(most_bytes: int) -> None:
    """From now on this process gets no more; who asks for it gets a MemoryError, or dies if it is no Python. Linux
    counts what is private and can be written to, whether it is used or not; elsewhere nothing is held."""
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = most_bytes - LIBRARY_BYTES
        with contextlib.suppress(ValueError, OSError):  # a lower limit is there already
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def check_limits(reading: Reading) -> None:
    """The settings that memory depends on are the user's own, and may be wrong too."""
    for option, value, most in (
        ("--max-document-mb", reading.max_document_mb, MOST_MB),
        ("--buffer-mb", reading.buffer_mb, MOST_BUFFER_MB),
        ("--max-growth", reading.max_growth, 1 << 30),
    ):
        if not 1 <= value <= most:
            raise UsageError(f"{option} is {value}; it is a whole number from 1 to {most:,}.")
