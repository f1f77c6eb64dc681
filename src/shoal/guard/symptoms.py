"""The words by which a log betrays the class of a failure (shoal.observe.causes).

The words are those of torch 2.13, gloo, NCCL, CUDA, glibc and CPython; each is tried on a line regardless of case.
"""

from __future__ import annotations

import re

# When one rank fails, the others say these; the one that began it says something else.
CONSEQUENCES = ("network", "hang")

# Asked in this order, so that what explains the rest comes first.
_WORDS = {
    "hardware": (
        r"silent corruption",
        r"uncorrectable ECC",
        r"NVRM: Xid",
        r"GPU has fallen off the bus",
        r"CUDA error: (?:hardware|unspecified launch)",
    ),
    "device-memory": (r"CUDA out of memory", r"torch\.OutOfMemoryError", r"STATUS_ALLOC_FAILED", r"HIP out of memory"),
    "host-memory": (
        r"\bMemoryError\b",
        r"Cannot allocate memory",
        r"DefaultCPUAllocator: (?:can't|not enough)",
        r"std::bad_alloc",
    ),
    "disk-full": (r"No space left on device", r"Disk quota exceeded", r"\bENOSPC\b", r"\bEDQUOT\b"),
    "numerics": (
        r"NumericsError",
        r"loss (?:is )?(?:nan|-?inf)\b",
        r"gradient norm (?:is )?(?:nan|-?inf)\b",
        r"non-?finite",
        r"loss has spiked",
    ),
    "hang": (
        r"Watchdog caught collective operation timeout",
        r"Timed out waiting \d+ ?ms for (?:recv|send)",
        r"DistStoreError.*timeout",
        r"wait timeout after \d+ ?ms",
        r"Timed out after \d+ seconds? waiting for clients",
    ),
    "network": (
        r"Connection (?:closed|reset) by peer",
        r"Connection refused",
        r"Broken pipe",
        r"Socket closed",
        r"Dist(?:Network|Backend)Error",
        r"nccl(?:System|Remote|Internal)Error",
        r"NCCL error",
        r"gloo.*(?:error|failed)",
        r"No route to host",
        r"Network is unreachable",
        r"Remote process (?:has )?(?:exited|terminated)",
        r"failed to connect",
        r"Address already in use",
    ),
}
SAID = tuple((cause, re.compile("|".join(words), re.IGNORECASE)) for cause, words in _WORDS.items())

# Code 78 covers several classes that differ in what to do, not in whether to retry; the sentence tells them apart.
ABOUT_DATA = re.compile(
    r"\b(?:data|dataset|shards?|tokens?|tokenizer|fingerprint|checksum|index\.json)\b", re.IGNORECASE
)
