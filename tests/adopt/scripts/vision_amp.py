import argparse
import os

import torch
import torch.backends.cudnn as cudnn
import torchvision
from torch.cuda.amp import GradScaler, autocast
from torchvision import transforms as T


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def train_one_epoch(model, loader, criterion, optimizer, scaler, args):
    model.train()
    losses = AverageMeter()
    for i, (images, target) in enumerate(loader):
        images, target = images.cuda(non_blocking=True), target.cuda(non_blocking=True)
        with autocast(enabled=args.amp):
            loss = criterion(model(images), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.update(loss.item(), images.size(0))
        if i % args.print_freq == 0:
            print(f"[{i}/{len(loader)}] loss {losses.avg:.4f}")


@torch.no_grad()
def validate(model, loader):
    model.eval()
    correct = 0
    for images, target in loader:
        correct += (model(images.cuda()).argmax(1) == target.cuda()).sum().item()
    return correct / len(loader.dataset)


def main(args):
    torch.manual_seed(args.seed)
    cudnn.benchmark = True
    train = torchvision.datasets.ImageFolder(
        os.path.join(args.data, "train"),
        T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor()]),
    )
    val = torchvision.datasets.ImageFolder(os.path.join(args.data, "val"), T.Compose([T.Resize(224), T.ToTensor()]))
    train_loader = torch.utils.data.DataLoader(train, args.batch_size, shuffle=True, num_workers=8, pin_memory=True)
    val_loader = torch.utils.data.DataLoader(val, args.batch_size, num_workers=8)
    model = torchvision.models.resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    scaler = GradScaler(enabled=args.amp)
    criterion = torch.nn.CrossEntropyLoss().cuda()
    start_epoch = best = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        scaler.load_state_dict(checkpoint["scaler"])
        start_epoch, best = checkpoint["epoch"], checkpoint["best"]
    for epoch in range(start_epoch, args.epochs):
        train_one_epoch(model, train_loader, criterion, optimizer, scaler, args)
        acc = validate(model, val_loader)
        scheduler.step()
        best = max(best, acc)
        torch.save(
            {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "scaler": scaler.state_dict(),
                "best": best,
                "args": vars(args),
            },
            "checkpoint.pth.tar",
        )


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("data")
    p.add_argument("--epochs", type=int, default=90)
    p.add_argument("--batch-size", type=int, default=256)
    p.add_argument("--print-freq", type=int, default=10)
    p.add_argument("--resume", default="")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--amp", action="store_true")
    main(p.parse_args())
