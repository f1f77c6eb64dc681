import os
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any, Dict, Optional

import torch
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainerConfig:
    max_epochs: int = 10
    batch_size: int = 64
    data_loader_workers: int = 2
    grad_norm_clip: float = 1.0
    snapshot_path: str = "snapshot.pt"
    save_every: int = 1
    use_amp: bool = True


@dataclass
class Snapshot:
    model_state: "OrderedDict[str, torch.Tensor]"
    optimizer_state: Dict[str, Any]
    scaler_state: Dict[str, Any]
    finished_epoch: int


class Trainer:
    def __init__(self, config: TrainerConfig, model, optimizer, train_dataset: Dataset):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.train_loader = self._prepare_dataloader(train_dataset)
        self.model = model.to(self.local_rank)
        self.optimizer = optimizer
        self.epochs_run = 0
        self.scaler = torch.amp.GradScaler("cuda", enabled=config.use_amp)
        self._load_snapshot()
        self.model = DDP(self.model, device_ids=[self.local_rank])

    def _prepare_dataloader(self, dataset):
        return DataLoader(
            dataset, batch_size=self.config.batch_size, pin_memory=True, shuffle=False,
            num_workers=self.config.data_loader_workers, sampler=DistributedSampler(dataset),
        )

    def _load_snapshot(self):
        if not os.path.exists(self.config.snapshot_path):
            return
        data = torch.load(self.config.snapshot_path, map_location="cpu")
        snapshot = Snapshot(**data)
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.scaler.load_state_dict(snapshot.scaler_state)
        self.epochs_run = snapshot.finished_epoch

    def _run_batch(self, source, targets):
        with torch.amp.autocast(device_type="cuda", dtype=torch.float16, enabled=self.config.use_amp):
            _, loss = self.model(source, targets)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def _run_epoch(self, epoch):
        self.train_loader.sampler.set_epoch(epoch)
        for it, (source, targets) in enumerate(self.train_loader):
            loss = self._run_batch(source.to(self.local_rank), targets.to(self.local_rank))
            if it % 100 == 0:
                print(f"[GPU{self.global_rank}] Epoch {epoch} | Iter {it} | Loss {loss.item():.5f}")

    def _save_snapshot(self, epoch):
        raw = self.model.module if hasattr(self.model, "module") else self.model
        snapshot = Snapshot(
            model_state=raw.state_dict(),
            optimizer_state=self.optimizer.state_dict(),
            scaler_state=self.scaler.state_dict(),
            finished_epoch=epoch,
        )
        snapshot = asdict(snapshot)
        torch.save(snapshot, self.config.snapshot_path)

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            epoch += 1
            self._run_epoch(epoch)
            if self.local_rank == 0 and epoch % self.config.save_every == 0:
                self._save_snapshot(epoch)


class CharDataset(Dataset):
    def __init__(self, path="input.txt", block=128):
        text = open(path).read()
        self.stoi = {c: i for i, c in enumerate(sorted(set(text)))}
        self.ids, self.block = [self.stoi[c] for c in text], block

    def __len__(self):
        return len(self.ids) - self.block

    def __getitem__(self, i):
        chunk = torch.tensor(self.ids[i : i + self.block + 1])
        return chunk[:-1], chunk[1:]


class Model(torch.nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, 128)
        self.drop = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(128, vocab)

    def forward(self, idx, targets=None):
        logits = self.head(self.drop(self.emb(idx)))
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    init_process_group(backend="nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(3407)
    data = CharDataset()
    model = Model(len(data.stoi))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    Trainer(TrainerConfig(), model, optimizer, data).train()


main()
