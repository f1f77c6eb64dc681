# checkpoint put together in pieces; saves every so many batches and skips what was read
import glob
import itertools
import os
import random

import numpy as np
import torch
import yaml
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

with open("config.yaml") as f:
    cfg = yaml.safe_load(f)


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Lines(Dataset):
    def __init__(self, pattern):
        self.lines = [line for name in sorted(glob.glob(pattern)) for line in open(name)]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        return torch.tensor([ord(c) % 128 for c in self.lines[i][:64].ljust(64)])


def collect(model, optimizer, scheduler=None, **extra):
    state = {"weights": model.state_dict()}
    state["optim"] = optimizer.state_dict()
    if scheduler is not None:
        state["lr"] = scheduler.state_dict()
    add_randomness(state)
    state.update(extra)
    return state


def add_randomness(into):
    into["rng_torch"] = torch.get_rng_state()
    into["rng_numpy"] = np.random.get_state()
    into["rng_python"] = random.getstate()


def newest(folder):
    found = sorted(glob.glob(os.path.join(folder, "step_*.pt")))
    return found[-1] if found else None


seed_all(cfg["seed"])
model = torch.nn.Sequential(
    torch.nn.Embedding(128, 64), torch.nn.Flatten(), torch.nn.Dropout(0.2), torch.nn.Linear(64 * 64, 128)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"])
scheduler = LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 100))
loader = DataLoader(Lines(cfg["files"]), batch_size=16, shuffle=True)

step = skip = first_epoch = 0
if (path := newest(cfg["out"])) is not None:
    state = torch.load(path, weights_only=False)
    model.load_state_dict(state["weights"])
    optimizer.load_state_dict(state["optim"])
    scheduler.load_state_dict(state["lr"])
    torch.set_rng_state(state["rng_torch"])
    np.random.set_state(state["rng_numpy"])
    random.setstate(state["rng_python"])
    step, first_epoch, skip = state["step"], state["epoch"], state["batch"]

for epoch in range(first_epoch, cfg["epochs"]):
    for number, batch in enumerate(itertools.islice(loader, skip, None), skip):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch), batch[:, 0])
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        if step % 500 == 0:
            target = os.path.join(cfg["out"], f"step_{step:08d}.pt")
            torch.save(collect(model, optimizer, scheduler, step=step, epoch=epoch, batch=number + 1), target + "~")
            os.replace(target + "~", target)
    skip = 0
