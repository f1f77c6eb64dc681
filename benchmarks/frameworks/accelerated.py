"""A loop by Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import Numbers, arguments, done, loss_of, net
from torch.utils.data import DataLoader

args = arguments()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(6)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Numbers(), batch_size=8, shuffle=True)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
first = 0
if args.resume:
    accelerator.load_state(args.resume)
    first = int(args.resume.rsplit("-", 1)[1])
step = 0
while step < args.steps:
    for rows in loader:
        if step < first:
            step += 1
            continue
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, rows))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        step += 1
        if step % args.save == 0:
            accelerator.save_state(f"{args.out}/step-{step}")
        if step == args.steps:
            break
done(accelerator.unwrap_model(model), args.out)
accelerator.end_training()
