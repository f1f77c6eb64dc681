"""DistributedDataParallel, with a sampler, accumulation and a schedule."""

import os

import torch
import torch.distributed as dist
from common import Numbers, arguments, done, loss_of, net
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

args = arguments()
dist.init_process_group("gloo")
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
first = 0
if args.resume:
    saved = torch.load(args.resume)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    first = saved["step"]
network = DistributedDataParallel(model)
sampler = DistributedSampler(Numbers(), seed=4)
step = epoch = 0
while step < args.steps:
    sampler.set_epoch(epoch)
    rows = list(DataLoader(Numbers(), batch_size=8, sampler=sampler))
    for pair in zip(rows[::2], rows[1::2], strict=True):
        step += 1
        if step <= first:
            continue
        torch.manual_seed(1000 * step + dist.get_rank())
        with network.no_sync():
            (loss_of(network, pair[0]) / 2).backward()
        (loss_of(network, pair[1]) / 2).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % args.save == 0 and dist.get_rank() == 0:
            os.makedirs(args.out, exist_ok=True)
            states = {"model": model, "optimizer": optimizer, "schedule": schedule}
            saved = {"step": step, **{name: one.state_dict() for name, one in states.items()}}
            torch.save(saved, f"{args.out}/step-{step:04d}.pt")
        if step == args.steps:
            break
    epoch += 1
done(model, args.out)
dist.destroy_process_group()
