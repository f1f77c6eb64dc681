"""Trainer of Lightning, over its own demo of a transformer's parts."""

import lightning
import torch
from common import Numbers, arguments, done, loss_of, net
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

args = arguments()
lightning.seed_everything(7)


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, rows, index):
        return loss_of(self.net, rows)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


keeps = ModelCheckpoint(args.out, filename="{step:04d}", every_n_train_steps=args.save, save_top_k=-1)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices="auto",
    max_steps=args.steps,
    callbacks=[keeps],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=args.out,
)
model = Lit()
loader = DataLoader(Numbers(), batch_size=16, shuffle=True)
trainer.fit(model, loader, ckpt_path=args.resume, weights_only=True if args.resume else None)
done(model.net, args.out)
