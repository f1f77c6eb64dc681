"""DDPM on a folder of pictures, with an EMA of the weights."""
import copy
import pickle
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils import data
from torchvision import transforms as T

IMAGES = "/data/ann/flowers"


class Pictures(data.Dataset):
    def __init__(self, folder, size=64):
        self.paths = [p for p in Path(folder).glob("**/*.jpg")]
        self.transform = T.Compose([T.Resize(size), T.RandomHorizontalFlip(), T.CenterCrop(size), T.ToTensor()])

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.transform(Image.open(self.paths[index]).convert("RGB"))


def cycle(dl):
    while True:
        for batch in dl:
            yield batch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, 3, 3, padding=1))

    def forward(self, x, t):
        return self.body(x) + t.view(-1, 1, 1, 1)


def q_sample(x, t, noise):
    a = torch.cos(t * 1.57).view(-1, 1, 1, 1)
    return a * x + (1 - a**2).sqrt() * noise


def main(steps=100_000, accumulate=2, results="results"):
    device = "cuda"
    model = Net().to(device)
    ema = copy.deepcopy(model)
    opt = torch.optim.Adam(model.parameters(), lr=8e-5)
    ds = Pictures(IMAGES)
    dl = cycle(data.DataLoader(ds, batch_size=16, shuffle=True, pin_memory=True))
    stats = pickle.load(open("stats.pkl", "rb"))
    print(stats)
    for step in range(steps):
        for _ in range(accumulate):
            x = next(dl).to(device)
            t = torch.rand(x.size(0), device=device)
            noise = torch.randn_like(x)
            loss = F.l1_loss(model(q_sample(x, t, noise), t), noise)
            loss.backward()
        print(f"{step}: {loss.item()}")
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for p, q in zip(ema.parameters(), model.parameters()):
                p.lerp_(q, 0.005)
        if step != 0 and step % 1000 == 0:
            torch.save({"step": step, "model": model.state_dict(), "ema": ema.state_dict()}, f"{results}/model.pt")


if __name__ == "__main__":
    main()
