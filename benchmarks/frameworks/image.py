"""An image model with a gradient scaler and two optimizers, as in a GAN."""

import os

import torch
from common import arguments, done
from torch import nn

args = arguments()
torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(8, 3 * 64), nn.Unflatten(1, (3, 8, 8)), nn.Conv2d(3, 3, 3, padding=1), nn.Tanh())
judge = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 1))
optimizers = [torch.optim.Adam(one.parameters(), lr=2e-4, betas=(0.5, 0.999)) for one in (maker, judge)]
scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=16.0)
both = nn.ModuleList([maker, judge])
first = 0
if args.resume:
    saved = torch.load(args.resume)
    both.load_state_dict(saved["model"])
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    scaler.load_state_dict(saved["scaler"])
    first = saved["step"]
says = nn.functional.binary_cross_entropy_with_logits
for step in range(first + 1, args.steps + 1):
    torch.manual_seed(step)
    real, noise = torch.randn(8, 3, 8, 8).tanh(), torch.randn(8, 8)
    made = maker(noise)
    loss = says(judge(real), torch.ones(8, 1)) + says(judge(made.detach()), torch.zeros(8, 1))
    scaler.scale(loss).backward()
    scaler.step(optimizers[1])
    optimizers[1].zero_grad()
    scaler.scale(says(judge(made), torch.ones(8, 1))).backward()
    scaler.step(optimizers[0])
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()
    if step % args.save == 0:
        os.makedirs(args.out, exist_ok=True)
        state = {"model": both.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}
        torch.save(state | {"scaler": scaler.state_dict()}, f"{args.out}/step-{step:04d}.pt")
done(both, args.out)
