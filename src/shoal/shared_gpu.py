"""For tests alone: with SHOAL_TEST_SHARE_GPU=1 several ranks may have one GPU, so that NCCL is tried on a single card.

NCCL refuses two ranks on one device only when both say that they are on one host. Each rank is given a host name of its
own; what they send then goes through sockets of the loopback. Communicators, streams, watchdogs and aborts are the real
ones; no time of such a run means anything. Without the setting more processes than GPUs stay refused. No torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

SETTING = "SHOAL_TEST_SHARE_GPU"


def sharing(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(SETTING, "") not in ("", "0")


def ranks_per_gpu(processes: int, gpus: int) -> int:
    """How many of this machine's processes the fullest GPU has: 1 unless tests have them share."""
    return math.ceil(processes / gpus) if sharing() and gpus and processes > gpus else 1


def sentence(processes: int, gpus: int) -> str:
    """What is told when it is on and has an effect."""
    return (
        f"{processes} processes share {gpus} GPU{'s' * (gpus > 1)} ({SETTING}, for tests alone): what is computed is "
        "right, no speed means anything"
    )


def settings(rank: int) -> dict[str, str]:
    """NCCL's, for a rank that shares its GPU; to be set before it joins."""
    return {"NCCL_HOSTID": f"h{rank}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
