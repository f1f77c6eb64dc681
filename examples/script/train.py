"""A plain DDP loop, as people write it: Shoal is not in it. Run it with `shoal run`, and break it on purpose."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--out", default="out")
parser.add_argument("--resume", help="a checkpoint to go on from")
args = parser.parse_args()

rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
if "RANK" in os.environ:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
first = 0
if args.resume:
    saved = torch.load(args.resume, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
network = DistributedDataParallel(model) if dist.is_initialized() else model

for step in range(first, args.steps):
    torch.manual_seed(step * 1000 + rank)  # the data of a step follows from its number: a resumed run reads the same
    x = torch.randn(32, 64, device=device)
    loss = (network(x) - x.cumsum(1) / 8).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step + 1) % 20 == 0:
        print(f"step {step + 1}  loss {loss.item():.4f}")
        os.makedirs(args.out, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, f"{args.out}/step-{step + 1:06d}.pt")
if dist.is_initialized():
    dist.destroy_process_group()
