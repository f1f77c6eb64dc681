import os

import torch
import torch.nn as nn
import torchvision.datasets as dset
import torchvision.transforms as transforms
import torchvision.utils as vutils

torch.manual_seed(999)
device = "cuda" if torch.cuda.is_available() else "cpu"
nz, n_critic = 100, 5


def wrap(seq):
    return nn.Sequential(*seq).to(device)


netG = wrap([nn.Linear(nz, 256), nn.ReLU(True), nn.Linear(256, 784), nn.Tanh()])
netD = wrap([nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(256, 1)])
optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
data = dset.MNIST("data", download=True, transform=transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.5, 0.5)]))
loader = torch.utils.data.DataLoader(data, batch_size=128, shuffle=True, num_workers=2)
fixed = torch.randn(64, nz, device=device)
bce = nn.BCEWithLogitsLoss()
start = 0

if os.path.exists("gan.pt"):
    saved = torch.load("gan.pt")
    netG.load_state_dict(saved["netG"])
    netD.load_state_dict(saved["netD"])
    optG.load_state_dict(saved["optG"])
    optD.load_state_dict(saved["optD"])
    torch.set_rng_state(saved["rng"])
    start = saved["epoch"] + 1

for epoch in range(start, 25):
    for i, (real, _) in enumerate(loader):
        real = real.view(real.size(0), -1).to(device)
        ones = torch.ones(real.size(0), 1, device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            fake = netG(torch.randn(real.size(0), nz, device=device))
            errD = bce(netD(real), ones) + bce(netD(fake.detach()), 1 - ones)
        optD.zero_grad()
        errD.backward()
        optD.step()
        if i % n_critic == 0:
            with torch.autocast(device, dtype=torch.bfloat16):
                errG = bce(netD(fake), ones)
            optG.zero_grad()
            errG.backward()
            optG.step()
        if i % 100 == 0:
            print("[%d][%d] D %.3f G %.3f" % (epoch, i, errD.item(), errG.item()))
    vutils.save_image(netG(fixed).view(-1, 1, 28, 28), "fake_%03d.png" % epoch)
    torch.save(
        {"netG": netG.state_dict(), "netD": netD.state_dict(), "optG": optG.state_dict(), "optD": optD.state_dict(),
         "rng": torch.get_rng_state(), "epoch": epoch},
        "gan.pt.new",
    )
    os.rename("gan.pt.new", "gan.pt")
