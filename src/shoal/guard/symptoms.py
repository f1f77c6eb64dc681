"""The classes of failure, what to do about each, and the words by which a log betrays them.

The words are those of torch 2.13, gloo, NCCL, CUDA, glibc and CPython; each is tried on a line regardless of case.
"""

from __future__ import annotations

import re

# What the person who reads it should do. docs/runbooks/NAME.md says more.
CAUSES = {
    "user-error": "correct the run file or the command, then start again",
    "environment": "mend what the sentence names, then `shoal resume`",
    "data": "`shoal data info FOLDER --verify` finds the damage; then `shoal resume`",
    "checkpoint": "`shoal checkpoint ls` shows which ones are good",
    "numerics": "lower the learning rate or lengthen the warm-up, then `shoal resume`",
    "host-memory": "use fewer processes, a smaller mesh.micro_batch, or a machine with more memory",
    "device-memory": "lower mesh.micro_batch or data.seq_len, or raise mesh.dp_shard",
    "disk-full": "free space or lower checkpoint.keep",
    "network": "look at the rank that the others lost; if none failed, at the network between them",
    "hang": "look at the stack of the named rank, in the journal's `hang` record or at the end of its log",
    "hardware": "take the machine out of service and look at its kernel log",
    "crash": "native code failed: the Python stack is at the end of the rank's log",
    "node-lost": "ask the scheduler what became of that node; the run goes on when there is another one",
    "killed": "somebody or something outside Shoal ended the process",
    "exception": "read the traceback in the rank's log",
    "unknown": "the worker left without a word; read the rank's log",
    "supervisor-lost": "nothing to do: the run goes on from its newest checkpoint",
}

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
