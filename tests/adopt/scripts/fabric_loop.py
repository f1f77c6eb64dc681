import time

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.demos import Transformer, WikiText2
from torch.utils.data import DataLoader, random_split


def main():
    L.seed_everything(42)
    fabric = L.Fabric(accelerator="auto", precision="bf16-mixed")
    fabric.launch()
    with fabric.rank_zero_first():
        dataset = WikiText2()
    train, val = random_split(dataset, [0.9, 0.1])
    train_loader = DataLoader(train, batch_size=20, shuffle=True)
    val_loader = DataLoader(val, batch_size=20)
    train_loader, val_loader = fabric.setup_dataloaders(train_loader, val_loader)
    model = Transformer(vocab_size=dataset.vocab_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    for epoch in range(10):
        run(fabric, model, optimizer, train_loader, epoch)
        check(fabric, model, val_loader)
        fabric.save("last.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})


def run(fabric, model, optimizer, loader, epoch):
    model.train()
    for i, (inp, target) in enumerate(loader):
        out = model(inp, target)
        loss = F.nll_loss(out, target.view(-1))
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, clip_val=0.25)
        optimizer.step()
        optimizer.zero_grad()
        if i % 200 == 0:
            fabric.print(f"{time.ctime()} epoch {epoch} it {i} loss {loss.item():.2f}")


@torch.no_grad()
def check(fabric, model, loader):
    model.eval()
    losses = torch.stack([F.nll_loss(model(i, t), t.view(-1)) for i, t in loader])
    out = fabric.all_gather(losses.mean()).mean()
    fabric.print(f"val {out:.2f}")


main()
