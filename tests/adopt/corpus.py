"""The hand-labelled scripts and the defects that are put into them. The second half was written after the rules, and
measured once before anything was changed for it (docs/decisions/080-adopt.md has the numbers)."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).with_name("scripts")

# script → the rules that are right to speak about it, as it is.
FIRST: dict[str, set[str]] = {
    "plain_loop.py": {"host-sync", "no-autocast"},
    "nanogpt_style.py": {"checkpoint-rng", "non-atomic-save"},
    "ddp_sampler.py": set(),
    "fsdp2.py": set(),
    "hf_trainer.py": set(),
    "lightning_style.py": set(),
    "accelerate_loop.py": set(),
    "vision_amp.py": {"checkpoint-rng", "non-atomic-save", "host-sync"},
    "gan.py": set(),
    "project/train.py": set(),
}
SECOND: dict[str, set[str]] = {
    "deepspeed_loop.py": set(),
    "imagenet_spawn.py": {"checkpoint-rng", "non-atomic-save", "no-autocast"},
    "pieces.py": {"unsafe-load"},
    "snapshot_class.py": {"checkpoint-rng", "non-atomic-save", "optimizer-early"},
    "trl_sft.py": set(),
    "fabric_loop.py": set(),
    "diffusion.py": {
        *("accumulation", "checkpoint-optimizer", "checkpoint-rng", "no-seed", "non-atomic-save"),
        *("absolute-path", "unsafe-load", "host-sync", "loader-workers", "no-autocast"),
    },
    "ppo.py": set(),
    "finetune_text.py": {"host-sync", "non-atomic-save"},
    "barrier_pair.py": {"non-atomic-save"},
}
LABELS = FIRST | SECOND


@dataclass(frozen=True)
class Defect:
    script: str
    rule: str
    old: str  # a text of the file that is there once
    new: str
    file: str = ""  # where it stands, if not in the script

    def put_into(self, folder: Path) -> Path:
        """A copy of the script with the defect in it."""
        script = copy_of(self.script, folder)
        file = script.parent / self.file if self.file else script
        text = file.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.script}: {self.old!r} is there {text.count(self.old)} times"
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")
        return script


def copy_of(script: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    source = SCRIPTS / script
    if "/" in script:
        shutil.copytree(source.parent, folder, dirs_exist_ok=True)
    else:
        shutil.copy(source, folder)
    return folder / source.name


FIRST_DEFECTS = [
    Defect("plain_loop.py", "no-seed", "torch.manual_seed(0)\n", ""),
    Defect("plain_loop.py", "zero-grad", "        opt.zero_grad()\n", ""),
    Defect("plain_loop.py", "optimizer-early",
           "net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)\n"
           "opt = torch.optim.Adam(net.parameters(), lr=1e-3)\n",
           "net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))\n"
           "opt = torch.optim.Adam(net.parameters(), lr=1e-3)\nnet.to(device)\n"),
    Defect("plain_loop.py", "absolute-path", '"regression.pt"', '"/home/ann/models/regression.pt"'),
    Defect("nanogpt_style.py", "accumulation", "            loss = loss / gradient_accumulation_steps\n", ""),
    Defect("nanogpt_style.py", "checkpoint-optimizer", '                "optimizer": optimizer.state_dict(),\n', ""),
    Defect("nanogpt_style.py", "train-mode", "    model.train()\n    return losses.mean()", "    return losses.mean()"),
    Defect("nanogpt_style.py", "host-sync",
           "        loss.backward()\n", "        loss.backward()\n        print(loss)\n"),
    Defect("ddp_sampler.py", "sampler-epoch", "        sampler.set_epoch(epoch)\n", ""),
    Defect("ddp_sampler.py", "one-rank-collective", "            print(epoch, total.item())\n",
           "            dist.all_reduce(total)\n            print(epoch, total.item())\n"),
    Defect("ddp_sampler.py", "ddp-sampler", "    sampler = DistributedSampler(data, shuffle=True)\n"
           "    loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=4, pin_memory=True)\n",
           "    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=4, pin_memory=True)\n"),
    Defect("ddp_sampler.py", "checkpoint-schedule", "        scheduler=scheduler.state_dict(),\n", ""),
    Defect("ddp_sampler.py", "fixed-world", "torch.cuda.set_device(local_rank)", "torch.cuda.set_device(0)"),
    Defect("ddp_sampler.py", "non-atomic-save", "    torch.save(state, tmp)\n    os.replace(tmp, path)\n",
           "    torch.save(state, path)\n"),
    Defect("vision_amp.py", "checkpoint-scaler", '                "scaler": scaler.state_dict(),\n', ""),
    Defect("vision_amp.py", "loader-workers", "shuffle=True, num_workers=8, pin_memory=True", "shuffle=True"),
    Defect("vision_amp.py", "unsafe-load", 'torch.load(args.resume, map_location="cpu")',
           'torch.load(args.resume, map_location="cpu", weights_only=False)'),
    Defect("gan.py", "checkpoint-optimizer", ' "optD": optD.state_dict(),', ""),
    Defect("project/train.py", "no-seed", "    fix_randomness(cfg.seed)\n", ""),
    Defect("project/train.py", "checkpoint-rng", '            "random": random_states(),\n', "", "lib/engine.py"),
]  # fmt: skip
SECOND_DEFECTS = [
    Defect("deepspeed_loop.py", "one-rank-collective",
           '                engine.save_checkpoint(args.ckpt_dir, client_state={"step": step})\n'
           "                if engine.global_rank == 0:\n",
           "                if engine.global_rank == 0:\n"
           '                    engine.save_checkpoint(args.ckpt_dir, client_state={"step": step})\n'),
    Defect("deepspeed_loop.py", "absolute-path", 'Tokens("train.bin")', 'Tokens("/mnt/nas/corpus/train.bin")'),
    Defect("imagenet_spawn.py", "one-rank-collective",
           "        acc1 = validate(val_loader, model)\n        scheduler.step()\n",
           "        scheduler.step()\n        acc1 = 0\n        if args.rank == 0:\n"
           "            acc1 = validate(val_loader, model)\n"),
    Defect("imagenet_spawn.py", "fixed-world", "    args.world_size = ngpus\n    mp.spawn(main_worker, nprocs=ngpus,",
           "    args.world_size = ngpus\n    mp.spawn(main_worker, nprocs=8,"),
    Defect("imagenet_spawn.py", "checkpoint-schedule",
           '                "scheduler": scheduler.state_dict(),\n', ""),
    Defect("imagenet_spawn.py", "train-mode", "    model.train()\n    end = time.time()", "    end = time.time()"),
    Defect("pieces.py", "checkpoint-rng", "    add_randomness(state)\n", ""),
    Defect("pieces.py", "checkpoint-optimizer", '    state["optim"] = optimizer.state_dict()\n', ""),
    Defect("pieces.py", "order-lost", "enumerate(itertools.islice(loader, skip, None), skip)", "enumerate(loader)"),
    Defect("pieces.py", "no-seed", "    torch.manual_seed(seed)\n", ""),
    Defect("snapshot_class.py", "sampler-epoch", "        self.train_loader.sampler.set_epoch(epoch)\n", ""),
    Defect("snapshot_class.py", "checkpoint-scaler", "            scaler_state=self.scaler.state_dict(),\n", ""),
    Defect("snapshot_class.py", "zero-grad", "        self.optimizer.zero_grad(set_to_none=True)\n", ""),
    Defect("fabric_loop.py", "zero-grad", "        optimizer.zero_grad()\n", ""),
    Defect("ppo.py", "zero-grad", "                optimizer.zero_grad()\n", ""),
    Defect("finetune_text.py", "accumulation", "outputs.loss / args.grad_accum", "outputs.loss"),
    Defect("finetune_text.py", "train-mode", "        count += 1\n    model.train()\n", "        count += 1\n"),
    Defect("finetune_text.py", "checkpoint-position", '            "epoch": epoch,\n', ""),
    Defect("barrier_pair.py", "one-rank-collective", "    if RANK == 0:\n        dist.barrier()\n", ""),
    Defect("barrier_pair.py", "host-sync", "            if step % 100:\n                continue\n", ""),
]  # fmt: skip
DEFECTS = FIRST_DEFECTS + SECOND_DEFECTS
