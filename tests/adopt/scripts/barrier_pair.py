import logging
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms
from torchvision.datasets import CIFAR10

log = logging.getLogger("train")
RANK = int(os.environ.get("RANK", 0))
LOCAL = int(os.environ.get("LOCAL_RANK", 0))


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def evaluating(net):
    was = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(was)


def mean_over_ranks(value):
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


def evaluate(net, loader, device):
    hits = torch.zeros((), device=device)
    with evaluating(net), torch.inference_mode():
        for x, y in loader:
            hits += (net(x.to(device)).argmax(1) == y.to(device)).float().mean()
    return mean_over_ranks(hits / len(loader))


def main():
    dist.init_process_group("nccl")
    torch.manual_seed(12)
    device = torch.device(f"cuda:{LOCAL}")
    torch.cuda.set_device(device)
    if RANK != 0:
        dist.barrier()
    train = CIFAR10("data", train=True, download=True, transform=transforms.ToTensor())
    test = CIFAR10("data", train=False, download=True, transform=transforms.ToTensor())
    if RANK == 0:
        dist.barrier()
    sampler = DistributedSampler(train, seed=12)
    loader = DataLoader(train, 256, sampler=sampler, num_workers=4, pin_memory=True, persistent_workers=True)
    held_out = DataLoader(test, 256, sampler=DistributedSampler(test, shuffle=False), num_workers=2)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
    net = DistributedDataParallel(net, device_ids=[LOCAL])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    best = torch.zeros((), device=device)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            with torch.autocast("cuda", torch.bfloat16):
                loss = nn.functional.cross_entropy(net(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 100:
                continue
            if is_main():
                log.info("epoch %d step %d loss %.3f", epoch, step, loss.item())
        accuracy = evaluate(net, held_out, device)
        if accuracy > best:
            best = accuracy
            if is_main():
                torch.save(net.module.state_dict(), "best.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
