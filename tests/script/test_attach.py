"""Three lines in a script: killed and gone on, it ends with the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.checkpoint import published
from shoal.errors import SetupError, UsageError
from shoal.script.attach import Attached
from shoal.script.plain import from_json, to_json
from tests.script.conftest import QUICK, ScriptRun

EPOCHS, BATCHES = 3, 6


class Killed(Exception):
    pass


def adamw(p: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(p, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9], gamma=0.5)


def sgd(p: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(p, lr=1e-2, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * BATCHES)


def plain(p: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(p, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)


def train(folder: Path, make: Callable[[Any], tuple[Any, Any]], until: int | None, every: int = 4) -> torch.Tensor:
    """The weights at its end; all that a process has is made anew, as in another process."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8))
    optimizer, schedule = make(model.parameters())
    data = TensorDataset(torch.arange(96.0).view(24, 4) / 96)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    run = shoal.attach(model, optimizer, schedule, every=every, folder=folder)
    for _ in run.epochs(EPOCHS):
        for (x,) in run.batches(loader):
            noise = random.gauss(0, 0.1) + float(np.random.normal()) * 0.1
            (model(x) + noise).square().mean().backward()
            optimizer.step(), schedule.step(), optimizer.zero_grad()
            run.step()
            if run.steps == until:
                raise Killed
    return torch.cat([t.flatten().double() for t in model.state_dict().values()])


@pytest.mark.parametrize("make", [adamw, sgd, plain])
@pytest.mark.parametrize("killed", [4, 7, 12, 13])  # as it is saved, within an epoch, at its end, after it
def test_what_was_killed_goes_on_to_the_same_bits(
    tmp_path: Path, make: Callable[[Any], tuple[Any, Any]], killed: int
) -> None:
    whole = train(tmp_path / "whole", make, None)
    with pytest.raises(Killed):
        train(tmp_path / "parts", make, killed)
    assert torch.equal(train(tmp_path / "parts", make, None), whole)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", adamw, None)
    with pytest.raises(Killed):
        train(tmp_path / "parts", adamw, 13)
    newest = tmp_path / "parts" / str(published(tmp_path / "parts")[0].name)
    (file,) = newest.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert torch.equal(train(tmp_path / "parts", adamw, None), whole)


def test_the_newest_three_are_kept(tmp_path: Path) -> None:
    train(tmp_path, adamw, None, every=1)
    assert [one.name.step for one in published(tmp_path)] == [18, 17, 16]


def test_what_cannot_be_saved_or_does_not_fit_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_SCRIPT", raising=False)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UsageError, match="give it folder="):
        shoal.attach(model, optimizer)
    with pytest.raises(UsageError, match="both are 1 or more"):
        shoal.attach(model, optimizer, every=0, folder=tmp_path)
    with pytest.raises(UsageError, match="cannot save a object: it has no state_dict"):
        shoal.attach(model, optimizer, object(), folder=tmp_path).save()
    run = shoal.attach(model, optimizer, folder=tmp_path)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    run.step(), run.save()
    with pytest.raises(SetupError, match="other optimizers, schedules or scalers"):
        shoal.attach(model, [optimizer, optimizer], folder=tmp_path)
    other = torch.nn.Linear(2, 3)
    with pytest.raises(shoal.ShoalError, match="has shape"):
        shoal.attach(other, torch.optim.SGD(other.parameters(), lr=0.1), folder=tmp_path)
    stranger = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    stranger.state[stranger.param_groups[0]["params"][0]]["momentum_buffer"] = torch.ones(2, 2)
    with pytest.raises(UsageError, match="that is not in the model"):
        shoal.attach(model, stranger, folder=tmp_path / "other").save()


def test_an_epoch_that_was_left_early_is_said(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    run = shoal.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    assert isinstance(run, Attached)
    with pytest.raises(UsageError, match="was not read to its end"):
        for _ in run.epochs(2):
            pass


def test_plain_values_come_back_as_they_were() -> None:
    from collections import Counter

    value = {"a": (1, 2.5, None), 3: [True, "x", {"": 1}], "c": Counter({4: 1, 9: 2}), "nested": {"t": ((1,),)}}
    back = from_json(__import__("json").loads(__import__("json").dumps(to_json(value))))
    assert back == value
    assert (type(back["a"]), type(back["c"])) == (tuple, Counter)


class Shared:
    """A loader whose sampler shares data out."""

    def __init__(self, count: int) -> None:
        self.sampler = self
        self.num_replicas, self._count = 1, count

    def __iter__(self) -> Any:
        return iter(range(self._count))


def test_another_number_of_processes_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = shoal.attach(model, optimizer, folder=tmp_path)
    for at in run.batches(Shared(6)):
        if at == 3:
            run._world = 2  # as if two had read four batches each
            run.save()
            break
    again = shoal.attach(model, optimizer, folder=tmp_path)
    assert list(again.batches(Shared(12))) == [8, 9, 10, 11]
    with pytest.raises(SetupError, match="the loader has 2 batches and 8 of this epoch were read before"):
        list(shoal.attach(model, optimizer, folder=tmp_path).batches(Shared(2)))


SCRIPT = """
import torch, torch.distributed as dist, shoal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(rank)
data = TensorDataset(torch.arange(192.0).view(48, 4) / 192)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True))
model = net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 4))
if "fsdp2" in sys.argv:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    assert all(isinstance(p, DTensor) for p in model.parameters())
else:
    net = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
run = shoal.attach(net, optimizer, every=4)
for epoch in run.epochs(2):
    for (x,) in run.batches(loader):
        (net(x) - x).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
        run.step()
        if "kill" in sys.argv and not attempt and run.steps == 9 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}
if rank == 0:
    torch.save(whole, sys.argv[1])
dist.destroy_process_group()
"""


@pytest.mark.slow  # six imports of torch; that one process goes on exactly is tested above
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_processes_of_which_one_is_killed_end_with_the_same_bits(script: ScriptRun, way: str) -> None:
    script.write(SCRIPT)
    two = ("--processes", "2", *QUICK)
    assert script.shoal("run", "--name", "whole", *two, "train.py", "whole.pt", way) == 0, script.out
    assert script.shoal("run", "--name", "demo", *two, "train.py", "parts.pt", way, "kill") == 0, script.out
    whole, parts = (torch.load(script.folder / f"{name}.pt") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    failure = script.one("failure")
    assert (failure["rank"], failure["action"]) == (1, "restart 1 of 3 from step 8 in 0.01 s")
    assert script.records("start")[1]["step"] == 8
    assert script.records("warning") == []
    saves = [record["step"] for record in script.records("checkpoint") if record["by"] == "shoal.attach"]
    assert saves == [4, 8, 12]
    assert script.shoal("checkpoint", "verify", "demo") == 0
