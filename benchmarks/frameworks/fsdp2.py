"""FSDP2, with torch's distributed checkpoints."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import Numbers, arguments, done, loss_of, net
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import fully_shard

args = arguments()
dist.init_process_group("gloo")
model = net()
fully_shard(model[0])
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
first = 0
if args.resume:
    of_model, of_optimizer = states.get_state_dict(model, optimizer)
    saved = {"model": of_model, "optimizer": of_optimizer, "step": 0}
    dcp.load(saved, checkpoint_id=args.resume)
    states.set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    first = saved["step"]
data, rank, world = Numbers(), dist.get_rank(), dist.get_world_size()
for step in range(first + 1, args.steps + 1):
    torch.manual_seed(1000 * step + rank)
    rows = torch.stack([data[(step * 16 + i * world + rank) % len(data)] for i in range(16 // world)])
    loss_of(model, rows).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % args.save == 0:
        of_model, of_optimizer = states.get_state_dict(model, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer, "step": step}
        dcp.save(state, checkpoint_id=f"{args.out}/step-{step:04d}")
whole = states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True, cpu_offload=True))
last = net()
if rank == 0:
    last.load_state_dict(whole)
done(last, args.out)
dist.destroy_process_group()
