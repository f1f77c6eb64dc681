import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        return x + self.ff(self.norm(x))


def batches(step, rank):
    g = torch.Generator().manual_seed(step * 1000 + rank)
    return torch.randn(8, 64, generator=g)


def main():
    dist.init_process_group()
    world, rank = dist.get_world_size(), dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(42)
    mesh = init_device_mesh("cuda", (world,))
    with torch.device("meta"):
        model = nn.Sequential(*[Block(64) for _ in range(4)])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    first = 0
    if os.path.isdir("ckpt"):
        ms, os_ = get_state_dict(model, optim)
        state = {"model": ms, "optim": os_, "step": 0}
        dcp.load(state, checkpoint_id="ckpt")
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        first = state["step"]

    for step in range(first, 1000):
        x = batches(step, rank).to(device)
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if step % 100 == 99:
            ms, os_ = get_state_dict(model, optim)
            dcp.save({"model": ms, "optim": os_, "step": step + 1}, checkpoint_id="ckpt")
            if rank == 0:
                print(step, loss.item())
    dist.destroy_process_group()


main()
