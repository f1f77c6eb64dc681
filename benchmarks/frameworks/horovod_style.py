"""As Horovod's own examples are written: broadcast at the start, a wrapped optimizer, averages of metrics."""

import os

import horovod.torch as hvd
import torch
from common import Numbers, arguments, done, loss_of, net
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

args = arguments()
hvd.init()
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
first = 0
if args.resume:
    saved = torch.load(args.resume)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
data = Numbers()
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
step = epoch = 0
while step < args.steps:
    sampler.set_epoch(epoch)
    epoch += 1
    for rows in DataLoader(data, batch_size=8, sampler=sampler):
        step += 1
        if step > first:
            torch.manual_seed(100 * step + hvd.rank())
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            optimizer.step()
            if step % args.save == 0 and hvd.rank() == 0:
                os.makedirs(args.out, exist_ok=True)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, f"{args.out}/step-{step:04d}.pt")
        if step == args.steps:
            break
done(model, args.out)
hvd.shutdown()
