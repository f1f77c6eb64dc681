"""A plain loop: no framework."""

import os

import torch
from common import Numbers, arguments, done, loss_of, net
from torch.utils.data import DataLoader

args = arguments()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
first = 0
if args.resume:
    saved = torch.load(args.resume)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
torch.manual_seed(0)
batches = DataLoader(Numbers(), batch_size=16, shuffle=True, num_workers=1)
step = 0
while step < args.steps:
    for rows in batches:
        step += 1
        if step <= first:
            continue
        loss_of(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.save == 0:
            os.makedirs(args.out, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, f"{args.out}/step-{step:04d}.pt")
        if step == args.steps:
            break
done(model, args.out)
