from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Clips(Dataset):
    def __init__(self, root):
        self.files = sorted(Path(root).glob("*.npy"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return torch.from_numpy(np.load(self.files[i])).float()


def make_loader(cfg):
    return DataLoader(Clips(cfg.root), batch_size=cfg.batch, shuffle=True, num_workers=6, drop_last=True)
