"""Horovod, in the style of its example of ImageNet: several batches for each step, a rate that warms up, checkpoints
after each epoch that it goes on from by itself."""

import argparse
import os

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--base-lr", type=float, default=0.0125)
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.00005)


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)
    )


def pictures():
    made = torch.Generator().manual_seed(1)
    kinds = torch.randint(5, (96,), generator=made)
    patterns = torch.randn(5, 3, 8, 8, generator=made)
    return TensorDataset(patterns[kinds] + 0.5 * torch.randn(96, 3, 8, 8, generator=made), kinds)


class Metric:
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def adjust_learning_rate(epoch, batch, args, batches, optimizer):
    rate = 1.0
    if epoch < args.warmup_epochs:
        epoch += float(batch + 1) / batches
        rate = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * rate


def main(args):
    hvd.init()
    torch.manual_seed(42 + hvd.rank())  # broadcast_parameters makes the models one
    torch.set_num_threads(1)
    os.makedirs(args.out, exist_ok=True)
    place = f"{args.out}/checkpoint-{{epoch}}.pt"
    resume_from = next((e for e in range(args.epochs, 0, -1) if os.path.exists(place.format(epoch=e))), 0)
    resume_from = hvd.broadcast(torch.tensor(resume_from), root_rank=0, name="resume_from").item()
    data = pictures()
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, batch_size=args.batch_size * args.batches_per_allreduce, sampler=sampler)
    model = network()
    optimizer = optim.SGD(
        model.parameters(),
        lr=args.base_lr * args.batches_per_allreduce * hvd.size(),
        momentum=args.momentum,
        weight_decay=args.wd,
    )
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Average,
    )
    losses = []
    if resume_from > 0 and hvd.rank() == 0:
        checkpoint = torch.load(place.format(epoch=resume_from))
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        losses = checkpoint["losses"]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(resume_from, args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        train_loss = Metric("train_loss")
        for batch, (shown, kinds) in enumerate(loader):
            adjust_learning_rate(epoch, batch, args, len(loader), optimizer)
            optimizer.zero_grad()
            for i in range(0, len(shown), args.batch_size):
                loss = F.cross_entropy(model(shown[i : i + args.batch_size]), kinds[i : i + args.batch_size])
                train_loss.update(loss)
                loss.div_(-(-len(shown) // args.batch_size))
                loss.backward()
            optimizer.step()
        losses.append(train_loss.avg)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: {train_loss.avg:.6f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
            torch.save(state, place.format(epoch=epoch + 1))
    if hvd.rank() == 0:
        torch.save({**model.state_dict(), "losses": torch.tensor(losses)}, f"{args.out}/final.pt")
    hvd.shutdown()


if __name__ == "__main__":
    main(parser.parse_args())
