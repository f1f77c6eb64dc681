"""DeepSpeed, ZeRO 2 on the CPU, driven by hand."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from common import Numbers, arguments, done, loss_of, net

args = arguments()
deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))  # nothing is compiled
deepspeed.init_distributed("gloo")
model = net()
config = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 1.0,
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
first = 0
if args.resume:
    engine.load_checkpoint(os.path.dirname(args.resume), tag=os.path.basename(args.resume))
    first = engine.global_steps
data, rank = Numbers(), engine.global_rank
for step in range(first + 1, args.steps + 1):
    torch.manual_seed(1000 * step + rank)
    rows = torch.stack([data[(step * 16 + 8 * rank + i) % len(data)] for i in range(8)])
    engine.backward(loss_of(engine, rows))
    engine.step()
    if step % args.save == 0:
        engine.save_checkpoint(args.out, tag=f"step-{step}")
done(engine.module, args.out)
torch.distributed.destroy_process_group()
