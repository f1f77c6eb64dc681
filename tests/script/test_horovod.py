"""Scripts that are written for Horovod, on Shoal's stand-in for it: the same numbers as DistributedDataParallel."""

from __future__ import annotations

import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from shoal.script.horovod.needed import PATH, needed
from tests.ranks import run_ranks
from tests.script.conftest import ScriptRun

pytestmark = pytest.mark.usefixtures("kept_ranks")
SCRIPTS = Path(__file__).with_name("horovod_style")


def hvd() -> Any:
    """As a script gets it."""
    if str(PATH) not in sys.path:
        sys.path.insert(0, str(PATH))
    import horovod.torch

    return horovod.torch


def run_script(rank: int, world: int, name: str, *args: str) -> None:
    hvd()
    sys.argv = [name, *args]
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    hvd().shutdown()


def in_ranks(work: Callable[[Any, int], Any], world: int = 2) -> list[Any]:
    def on_rank(rank: int, world: int) -> Any:
        module = hvd()
        module.init()
        found = work(module, rank)
        module.shutdown()
        return found

    return run_ranks(on_rank, world)


def digits_by_ddp(rank: int, world: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    hvd()
    script = runpy.run_path(str(SCRIPTS / "mnist.py"))
    torch.manual_seed(42)
    data = script["digits"]()
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(script["Net"]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * world, momentum=0.5)
    losses = []
    for epoch in (1, 2):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        list(loader)  # for the test; a loader draws a random number
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    return model.module.state_dict(), mean / world


def pictures_by_ddp(rank: int, world: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    hvd()
    script = runpy.run_path(str(SCRIPTS / "imagenet.py"))
    torch.manual_seed(42)
    data = script["pictures"]()
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(script["network"](), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.00005)
    means = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        losses = []
        for batch, (x, y) in enumerate(loader):
            at = epoch + (batch + 1) / len(loader)
            optimizer.param_groups[0]["lr"] = 0.0125 * 2 * (at / 2 + 1 if epoch < 2 else 2)
            optimizer.zero_grad()
            with model.no_sync():
                first = F.cross_entropy(model(x[:4]), y[:4])
                (first / 2).backward()
            second = F.cross_entropy(model(x[4:]), y[4:])
            (second / 2).backward()
            optimizer.step()
            losses += [first.item(), second.item()]
        means.append(sum(losses) / len(losses))
    mean = torch.tensor(means)
    dist.all_reduce(mean)
    return model.module.state_dict(), mean / world


def equal_to(ddp: tuple[dict[str, torch.Tensor], torch.Tensor], file: Path) -> None:
    weights, losses = ddp
    found = torch.load(file)
    torch.testing.assert_close(found.pop("losses"), losses, rtol=0, atol=1e-6)
    torch.testing.assert_close(found, weights, rtol=0, atol=1e-6)


def test_an_example_of_digits_learns_as_with_ddp(tmp_path: Path) -> None:
    run_ranks(run_script, 2, "mnist.py", "--out", str(tmp_path))
    ddp = run_ranks(digits_by_ddp, 2)[0]
    equal_to(ddp, tmp_path / "final.pt")
    run_ranks(run_script, 2, "mnist.py", "--out", str(tmp_path), "--gradient-predivide-factor", "2")
    equal_to(ddp, tmp_path / "final.pt")
    run_ranks(run_script, 2, "mnist.py", "--out", str(tmp_path), "--fp16-allreduce")
    with pytest.raises(AssertionError):
        equal_to(ddp, tmp_path / "final.pt")  # a rounding that is there is seen


def test_an_example_of_pictures_accumulates_and_goes_on_as_with_ddp(tmp_path: Path) -> None:
    run_ranks(run_script, 2, "imagenet.py", "--out", str(tmp_path), "--epochs", "1")
    run_ranks(run_script, 2, "imagenet.py", "--out", str(tmp_path))
    equal_to(run_ranks(pictures_by_ddp, 2)[0], tmp_path / "final.pt")


@pytest.mark.slow
def test_an_example_of_pictures_is_killed_and_goes_on_as_with_ddp(
    script: ScriptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_PROBE_MEASURED", "kill")  # in the step after the first save
    code = script.shoal(
        *("run", "--name", "demo", "--processes", "2", "track.mlflow=false", "guard.backoff_s=0.01"),
        str(SCRIPTS / "imagenet.py"),
    )
    assert code == 0, script.err
    assert script.one("failure")["signal"] == "SIGKILL"
    assert "epoch 1:" in script.log(0)
    assert "epoch 1:" not in script.log(1)
    assert sum(record.get("steps", 1) for record in script.records("step") if record["attempt"] == 1) == 12
    (decision,) = [r for r in script.records("decision") if r["key"] == "script.horovod"]
    assert decision["value"] is True
    assert "stands in for it" in decision["why"]
    equal_to(run_ranks(pictures_by_ddp, 2)[0], script.folder / "out" / "final.pt")


def test_collectives_give_what_horovod_gives() -> None:
    def work(h: Any, rank: int) -> None:
        assert (h.rank(), h.size(), h.local_rank(), h.local_size()) == (rank, 2, rank, 2)
        assert (h.cross_rank(), h.cross_size(), h.is_homogeneous(), h.mpi_built()) == (0, 1, True, False)
        mine = torch.tensor([1.0, 2.0]) * (rank + 1)
        assert h.allreduce(mine).tolist() == h.allreduce(mine, average=True).tolist() == [1.5, 3.0]
        for op, found in ((h.Sum, [3.0, 6.0]), (h.Min, [1.0, 2.0]), (h.Max, [2.0, 4.0]), (h.Product, [2.0, 8.0])):
            assert h.allreduce(mine, op=op).tolist() == found
        assert h.allreduce(mine, op=h.Sum, prescale_factor=2, postscale_factor=0.5).tolist() == [3.0, 6.0]
        assert h.allreduce(torch.tensor([3 + rank])).tolist() == [3]  # of whole numbers: 7 / 2
        assert h.allreduce(mine, compression=h.Compression.fp16).dtype == torch.float32
        many = [torch.full((2, 3), float(rank)), torch.tensor(rank), mine.half()]
        assert [t.tolist() for t in h.grouped_allreduce(many, op=h.Sum)] == [[[1.0] * 3] * 2, 1, [3.0, 6.0]]
        assert mine.tolist() == [1.0 * (rank + 1), 2.0 * (rank + 1)]
        handle = h.allreduce_async_(mine, name="mine")
        assert h.synchronize(handle) is mine
        assert h.poll(handle)
        assert mine.tolist() == [1.5, 3.0]
        assert h.synchronize(h.grouped_allreduce_async([mine], op=h.Sum))[0].tolist() == [3.0, 6.0]
        gathered = h.allgather(torch.full((rank + 1, 2), float(rank)))
        assert gathered.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
        assert h.broadcast(torch.tensor([rank]), root_rank=1).tolist() == [1]
        column = torch.full((3, 2), float(rank)).t()[0]  # its numbers do not lie together
        assert h.broadcast_(column, 1).tolist() == [1.0, 1.0, 1.0]
        assert h.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
        assert h.allgather_object(f"rank {rank}") == ["rank 0", "rank 1"]
        h.barrier()

    in_ranks(work)


def test_gradients_go_through_collectives() -> None:
    def work(h: Any, rank: int) -> list[Any]:
        found = []
        for collective in (h.allreduce, lambda t: h.broadcast(t, 1), h.allgather):
            x = torch.tensor([2.0 + rank], requires_grad=True)
            (collective(x) * torch.tensor([3.0])).sum().backward()
            found.append(x.grad.tolist())
        return found

    assert in_ranks(work) == [[[3.0], [0.0], [3.0]], [[3.0], [3.0], [3.0]]]


def test_an_optimizer_begins_with_the_state_of_one_rank() -> None:
    def work(h: Any, rank: int) -> list[float]:
        p = torch.nn.Parameter(torch.full((2,), float(rank)))
        optimizer = torch.optim.SGD([p], lr=0.5 / (rank + 1), momentum=0.9, weight_decay=0.1)
        if rank == 0:
            p.grad = torch.ones(2)
            optimizer.step()
        h.broadcast_parameters([("p", p)], root_rank=0)
        h.broadcast_optimizer_state(optimizer, root_rank=0)
        fresh = torch.nn.Parameter(torch.ones(1))
        h.broadcast_optimizer_state(torch.optim.SGD([fresh], lr=1.0, weight_decay=0.5), root_rank=0)
        moment = optimizer.state[p]["momentum_buffer"]
        return [*p.tolist(), *moment.tolist(), optimizer.param_groups[0]["lr"], fresh.item()]

    first, second = in_ranks(work)
    assert first == second == [-0.5, -0.5, 1.0, 1.0, 0.5, 1.0]


def test_a_schedule_and_clipping_and_a_closure_see_reduced_gradients() -> None:
    def work(h: Any, rank: int) -> list[float]:
        p = torch.nn.Parameter(torch.zeros(1))
        unused = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([p, unused], lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # it takes hold of the step before
        optimizer = h.DistributedOptimizer(optimizer, named_parameters=[("p", p), ("unused", unused)])
        assert isinstance(optimizer, torch.optim.SGD)
        found = []
        (p * (2.0 + 2 * rank)).sum().backward()
        optimizer.step()  # gradients 2 and 4
        schedule.step()
        found.append(p.item())
        optimizer.zero_grad()
        (p * (2.0 + 2 * rank)).sum().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_([p], 1.5)
        with optimizer.skip_synchronize(), warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()  # 0.5 times the clipped mean
        found.append(p.item())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (p * (2.0 * rank)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert unused.grad is not None
        return [*found, p.item()]

    for found in in_ranks(work):
        assert found == pytest.approx([-3.0, -3.75, -4.25], abs=1e-5)


def test_who_has_joined_gives_zeros_until_all_have() -> None:
    def work(h: Any, rank: int) -> tuple[list[float], int]:
        seen = [h.allreduce(torch.ones(2), op=h.Sum)[0].item() for _ in range(1 + 2 * rank)]
        seen += [h.allreduce(torch.ones(3))[0].item()] if rank else []
        last = h.join()
        h.barrier()
        return seen, last

    assert in_ranks(work) == [([2.0], 1), ([2.0, 1.0, 1.0, 0.5], 1)]


def test_ranks_that_call_different_things_are_told_so() -> None:
    def work(h: Any, rank: int) -> str:
        with pytest.raises(RuntimeError) as told:
            h.allreduce(torch.ones(2)) if rank else h.broadcast(torch.ones(3), 0)
        return str(told.value)

    for told in in_ranks(work):
        assert told.startswith("rank 0 calls broadcast from rank 0 float32[3] and rank 1 calls allreduce Average fl")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import horovod.tensorflow as hvd", "horovod.tensorflow"),
        ("import horovod.tensorflow.keras as hvd", "horovod.tensorflow"),
        ("import horovod.keras", "horovod.keras"),
        ("from horovod import mxnet", "horovod.mxnet"),
        ("import horovod.torch as hvd\nhvd.elastic.run", "horovod.torch.elastic"),
        ("from horovod.torch.elastic import run", "horovod.torch.elastic"),
        ("import horovod\nhorovod.run(print)", "horovod.run"),
        ("import horovod.torch as hvd\nhvd.allreduce(None, op=hvd.Adasum)", "horovod.torch.Adasum"),
        ("import horovod.torch as hvd\nhvd.alltoall(None)", "horovod.torch.alltoall"),
    ],
)
def test_what_is_not_there_is_refused_by_name(text: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(PATH), *sys.path])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with pytest.raises(ImportError, match=f"^{named} is not in Shoal's stand-in for Horovod: ") as told:
        exec(text, {})
    assert ". " not in str(told.value)  # one sentence


@pytest.mark.parametrize(
    ("text", "is_needed"),
    [
        ("import horovod.torch as hvd", True),
        ("def main():\n    from horovod import torch", True),
        ("try:\n    import horovod.torch\nexcept ImportError:\n    pass", False),
        ("try:\n    import horovod.torch\nfinally:\n    pass", True),
        ("from .horovod import x", False),
        ("import horovodish", False),
    ],
)
def test_it_stands_in_where_a_script_cannot_do_without(tmp_path: Path, text: str, is_needed: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert needed(script, "") is is_needed
    (tmp_path / "site" / "horovod").mkdir(parents=True)
    (tmp_path / "site" / "horovod" / "__init__.py").write_text("")
    assert not needed(script, str(tmp_path / "site"))


def test_it_is_there_only_where_it_is_asked_for(script: ScriptRun) -> None:
    text = """
    from importlib.util import find_spec
    print("found", find_spec("horovod") is not None)
    """
    assert script.run(text) == 0
    assert "found False" in script.out
    assert script.shoal("run", "--name", "asked", "--no-probe", "--horovod", "track.mlflow=false", "train.py") == 0
    assert "found True" in script.out
