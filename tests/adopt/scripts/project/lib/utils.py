import os
import random

import numpy as np
import torch as t


def fix_randomness(seed):
    random.seed(seed)
    np.random.seed(seed)
    t.manual_seed(seed)


def write_whole(obj, path):
    part = f"{path}.part"
    t.save(obj, part)
    os.replace(part, path)


def random_states():
    return {"torch": t.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def set_random_states(states):
    t.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
