"""Which device the tests of this folder use: a GPU. With SHOAL_TEST_DEVICE=cpu those of several ranks run over gloo,
which is how they are tried where there is none."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE_SETTING = "SHOAL_TEST_DEVICE"
MPS = "CUDA_MPS_PIPE_DIRECTORY"  # set: an MPS daemon lets the ranks of a GPU run beside each other
RANKS_A_CORE = 1.5  # a rank waits now and then; starting it does not
TAKING_TURNS = 8  # ranks of a GPU without MPS: an all_reduce of 1 KB takes 50 ms then, of 16 ranks 0.2 s
DEVICE = os.environ.get(DEVICE_SETTING) or "cuda"
GPUS = torch.cuda.device_count() if DEVICE == "cuda" else 0

needs_device = pytest.mark.skipif(DEVICE == "cuda" and not GPUS, reason="torch sees no GPU here")


def ranks_at_once() -> int:
    """How many ranks, of all jobs together, are trained at a time; a job with more has the machine for itself."""
    cores = int(RANKS_A_CORE * len(os.sched_getaffinity(0)))
    return cores if not GPUS or os.environ.get(MPS) else min(cores, TAKING_TURNS * GPUS)
