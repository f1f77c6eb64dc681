import os

import torch as t
from torch import nn, optim

from .utils import random_states, set_random_states, write_whole


class Engine:
    def __init__(self, cfg, loader):
        self.cfg, self.loader = cfg, loader
        self.device = t.device("cuda" if t.cuda.is_available() else "cpu")
        self.net = nn.Sequential(nn.Linear(128, 512), nn.SiLU(), nn.Dropout(0.1), nn.Linear(512, 128)).to(self.device)
        self.opt = optim.AdamW(self.net.parameters(), lr=cfg.lr)
        self.sched = optim.lr_scheduler.OneCycleLR(self.opt, cfg.lr, total_steps=10_000)
        self.epoch = 0

    def state(self):
        return {
            "net": self.net.state_dict(),
            "opt": self.opt.state_dict(),
            "sched": self.sched.state_dict(),
            "epoch": self.epoch,
            "random": random_states(),
        }

    def maybe_resume(self):
        path = os.path.join(self.cfg.out, "last.pt")
        if os.path.exists(path):
            state = t.load(path, map_location=self.device, weights_only=True)
            self.net.load_state_dict(state["net"])
            self.opt.load_state_dict(state["opt"])
            self.sched.load_state_dict(state["sched"])
            self.epoch = state["epoch"]
            set_random_states(state["random"])

    def loss(self, batch):
        with t.autocast(self.device.type, dtype=t.bfloat16):
            return nn.functional.mse_loss(self.net(batch), batch)

    def fit(self):
        while self.epoch < self.cfg.epochs:
            self.run_epoch()
            self.epoch += 1
            write_whole(self.state(), os.path.join(self.cfg.out, "last.pt"))

    def run_epoch(self):
        self.net.train()
        for i, batch in enumerate(self.loader):
            loss = self.loss(batch.to(self.device)) / self.cfg.accumulate
            loss.backward()
            if (i + 1) % self.cfg.accumulate == 0:
                self.opt.step()
                self.sched.step()
                self.opt.zero_grad()
            if i % 50 == 0:
                print(self.epoch, i, float(loss))
