"""Horovod, in the style of its example of digits: dropout, a metric that is averaged, a test after each epoch."""

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
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, kernel_size=3)
        self.conv2 = nn.Conv2d(4, 8, kernel_size=3)
        self.drop = nn.Dropout2d()
        self.fc1 = nn.Linear(72, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(self.drop(self.conv2(x)))
        x = F.dropout(F.relu(self.fc1(x.flatten(1))), training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def digits():
    """Pictures of 12 by 12 points and what they show, in place of a download."""
    made = torch.Generator().manual_seed(0)
    shown = torch.randint(10, (96,), generator=made)
    patterns = torch.randn(10, 1, 12, 12, generator=made)
    return TensorDataset(patterns[shown] + 0.3 * torch.randn(96, 1, 12, 12, generator=made), shown)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def main(args):
    hvd.init()
    torch.manual_seed(42)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(hvd.local_rank())
    torch.set_num_threads(1)
    data = digits()
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model = Net()
    lr_scaler = hvd.size() if not args.use_adasum else 1
    if cuda:
        model.cuda()
        if args.use_adasum and hvd.nccl_built():
            lr_scaler = hvd.local_size()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    losses = []
    for epoch in range(1, args.epochs + 1):
        model.train()
        sampler.set_epoch(epoch)
        for pictures, shown in loader:
            if cuda:
                pictures, shown = pictures.cuda(), shown.cuda()
            optimizer.zero_grad()
            loss = F.nll_loss(model(pictures), shown)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            found = sum((model(x.cuda() if cuda else x).argmax(1).cpu() == y).sum().item() for x, y in loader)
        right = metric_average(found / len(sampler), "right")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.6f}, {100 * right:.1f}% right", flush=True)
    losses = hvd.allreduce(torch.tensor(losses), name="losses")
    if hvd.rank() == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save({**model.cpu().state_dict(), "losses": losses}, f"{args.out}/final.pt")


if __name__ == "__main__":
    main(parser.parse_args())
