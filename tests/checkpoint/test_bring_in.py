"""What other programs have saved becomes a checkpoint of Shoal's, and a run can start from it."""

from __future__ import annotations

import json
import resource
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file, save_file
from tests.checkpoint.states import same_bits
from tests.checkpoint.test_dcp import save as save_dcp
from tests.checkpoint.titan import MODEL, titan
from tests.ranks import run_ranks
from tests.slow import some_slow
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shoal import checkpoint
from shoal.checkpoint import boxes, find
from shoal.checkpoint.foreign.bring_in import Brought, bring_in, open_source
from shoal.checkpoint.foreign.shapes import model_of
from shoal.checkpoint.foreign.start_from import load_weights
from shoal.checkpoint.rows import Slice
from shoal.errors import CheckpointError, DataError, ShoalError, UsageError
from shoal.model.decoder import Decoder
from shoal.model.hf import load_weights as load_hf
from shoal.model.hf import save_folder
from shoal.model.hf_names import pieces
from shoal.spec.model import Experts, Mamba, Model
from shoal.spec.shape import Shape, shape_of

TOKENS = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))
SMALL = Model(vocab_size=64, dim=16, layers=2, heads=2, ffn_dim=24)


def taken_in(source: Path, out: Path, like: Model | None = None, **options: Any) -> Brought:
    with ExitStack() as stack:
        return bring_in(open_source(str(source), out.parent, stack), out, like, **options)


def newest(root: Path) -> checkpoint.Found:
    found = checkpoint.newest(root, verify=True)
    assert found is not None
    return found


def made(shape: Shape, seed: int) -> Decoder:
    model = Decoder(shape)
    model.init_weights(seed)
    return model


def started_from(where: Path, shape: Shape) -> Decoder:
    model = made(shape, seed=99)
    load_weights(model, where)
    return model


def same_weights(a: Decoder, b: Decoder) -> bool:
    return same_bits(a.state_dict(), b.state_dict())


def save_titan(folder: Path, world: int) -> tuple[dict[str, torch.Tensor], int]:
    """What torchtitan saves: sharded weights at the top, the optimizer flattened, its counters. Returns it whole."""

    def work(rank: int, world: int) -> dict[str, torch.Tensor]:
        model = titan(seed=3)
        mesh = init_device_mesh("cpu", (world,))
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            model(TOKENS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        weights, state = get_state_dict(model, optimizer, options=options)
        others = {"train_state": {"step": 2, "ntokens_seen": 96}, "lr_scheduler": {"last_epoch": 2}}
        torch_dcp.save({**weights, "optimizer": state, **others}, checkpoint_id=folder)
        everything: dict[str, Any] = {**weights}
        everything |= {f"optimizer.{name}": t for name, t in state.items() if name.startswith("state.")}
        return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in everything.items()}

    return run_ranks(work, world)[0], 2


@pytest.mark.parametrize("world", some_slow([2, 4], slow=[4]))
def test_torchtitan_weights_give_the_same_logits_and_its_optimizer_comes_along(world: int, tmp_path: Path) -> None:
    saved, step = save_titan(tmp_path / "titan", world)
    reference = titan(seed=0)
    reference.load_state_dict({name: t for name, t in saved.items() if not name.startswith("optimizer.")})
    brought = taken_in(tmp_path / "titan", tmp_path / "out", MODEL)
    assert (brought.convention, brought.step, brought.startable, brought.notes) == ("torchtitan", step, True, ())

    found = newest(tmp_path / "out")
    model = started_from(tmp_path / "out", shape_of(MODEL))
    with torch.no_grad():
        ours, theirs = model(TOKENS), reference(TOKENS)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        # Without the change of order they would not: the reference is one that notices.
        model.get_parameter("blocks.0.attention.q.weight").copy_(saved["layers.0.attention.wq.weight"])
        assert (model(TOKENS) - theirs).abs().max() > 1e-2
    # Numbers move, none changes: every tensor of the optimizer has the same numbers, those of q and k in another order.
    names = {"tok_embeddings.weight": "embed.weight", "layers.1.feed_forward.w2.weight": "blocks.1.ffn.down.weight"}
    tensors = {**checkpoint.read_full(found, "model."), **checkpoint.read_full(found, "optim.")}
    for theirs_, ours_ in names.items():
        assert torch.equal(tensors[ours_], saved[theirs_])
        assert torch.equal(tensors[f"{ours_}.exp_avg"], saved[f"optimizer.state.{theirs_}.exp_avg"])
    q, moment = (
        tensors["blocks.0.attention.q.weight.exp_avg_sq"],
        saved["optimizer.state.layers.0.attention.wq.weight.exp_avg_sq"],
    )
    rows = [head * 8 + 2 * pair + half for head in range(4) for half in (0, 1) for pair in range(4)]
    assert torch.equal(q, moment[rows])
    assert len(tensors) == 3 * len(reference.state_dict())
    assert found.extra["imported"]["values"] == {
        "train_state.step": 2,
        "train_state.ntokens_seen": 96,
        "lr_scheduler.last_epoch": 2,
    }


def hf_names(shape: Shape, model: Decoder) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    found = {p.name: torch.empty(p.shape) for p in pieces(shape)}
    for p in pieces(shape):
        ours = state[p.of] if p.expert is None else state[p.of][p.expert]
        found[p.name][p.first : p.first + len(ours)] = ours.reshape(-1, *p.shape[1:])
    return found


@pytest.mark.parametrize("kind", ["tied", "experts", "states"])
def test_a_dcp_checkpoint_of_a_hugging_face_model_becomes_ours(kind: str, tmp_path: Path) -> None:
    experts = Experts(count=3, top_k=2, ffn_dim=20)
    states = Mamba(attention_layers=(1,), heads=4, state_dim=8, groups=2)
    kinds: dict[str, dict[str, Any]] = {
        "tied": {"tie_embeddings": True},
        "experts": {"family": "mixtral", "experts": experts},
        "states": {"family": "bamba", "mamba": states},
    }
    fields = kinds[kind]
    like = SMALL.model_copy(update=fields)
    shape = shape_of(like)
    original = made(shape, seed=5)
    state = hf_names(shape, original)
    if kind == "tied":
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    moments = {name: {"exp_avg": t * 2, "step": torch.tensor(7.0)} for name, t in state.items()}
    save_dcp(tmp_path / "dcp", {"model": state, "optim": {"state": moments}})
    brought = taken_in(tmp_path / "dcp", tmp_path / "out", like)
    assert (brought.convention, brought.step, brought.notes) == ("transformers", 7, ())
    assert same_weights(started_from(tmp_path / "out", shape), original)
    moved = checkpoint.read_full(newest(tmp_path / "out"), "optim.")
    assert moved.keys() == {f"{name}.exp_avg" for name, _ in original.named_parameters()}
    assert all(torch.equal(moved[f"{name}.exp_avg"], p * 2) for name, p in original.named_parameters())


def test_names_that_are_ours_need_no_shape(tmp_path: Path) -> None:
    original = made(shape_of(SMALL), seed=6)
    save_dcp(tmp_path / "dcp", {"app": {"model": original.state_dict(), "rng": torch.ones(3)}})
    brought = taken_in(tmp_path / "dcp", tmp_path / "out")
    assert brought.notes == ("left out, as no part of the model: app.rng.",)
    assert not brought.startable
    assert same_weights(started_from(tmp_path / "out", shape_of(SMALL)), original)


def test_names_of_nobody_are_kept_and_their_bits_too(tmp_path: Path) -> None:
    a, b, none = torch.randn(5, 7).to(torch.bfloat16), torch.arange(9), torch.empty(0, 3)
    save_dcp(tmp_path / "dcp", {"a": a, "deep": {"b": b, "none": none}, "note": "hello", "bad": {1, 2}})
    brought = taken_in(tmp_path / "dcp", tmp_path / "out", step=12)
    assert (brought.step, brought.convention, brought.startable) == (12, None, False)
    assert len(brought.notes) == 2
    assert "no plain values: bad" in brought.notes[0]
    assert same_bits(checkpoint.read_full(newest(tmp_path / "out")), {"a": a, "deep.b": b, "deep.none": none})


def test_a_hugging_face_folder_and_what_is_imported_from_it_start_the_same_run(tmp_path: Path) -> None:
    original = made(shape_of(SMALL), seed=7)
    save_folder(tmp_path / "hf", shape_of(SMALL), original.state_dict(), dtype=torch.bfloat16)
    brought = taken_in(tmp_path / "hf", tmp_path / "out")
    assert brought.startable
    direct = made(shape_of(SMALL), seed=99)
    load_hf(direct, tmp_path / "hf")
    imported = started_from(tmp_path / "out", shape_of(SMALL))  # bfloat16 there, float32 here
    assert same_weights(imported, direct)
    described = model_of(newest(tmp_path / "out"))
    assert described is not None
    # The rule of the start values is not in a config.json, nor in what is imported from it.
    assert replace(shape_of(described), init=shape_of(SMALL).init) == shape_of(SMALL)


def save_as_colossal(folder: Path, shape: Shape, model: Decoder, safe: bool) -> None:
    """As `booster.save_model(model, folder, shard=True, use_safetensors=safe)` names files: numbers without their sum,
    an index of what is where, and the config of the model."""
    save_folder(folder / "whole", shape, model.state_dict())
    tensors = load_file(folder / "whole" / "model.safetensors")
    (folder / "whole" / "config.json").rename(folder / "config.json")
    shutil.rmtree(folder / "whole")
    base, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    names = sorted(tensors)
    where: dict[str, str] = {}
    for number, some in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        shard = {name: tensors[name] for name in some}
        file = f"{base}-{number:05d}.{ending}"
        where |= dict.fromkeys(some, file)
        if safe:
            save_file(shard, folder / file, metadata={"format": "pt"})
        else:
            torch.save(OrderedDict(shard), folder / file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / f"{base}.{ending}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize("tied", [False, True], ids=["two ends", "tied"])
def test_weights_that_colossal_saved_in_shards_become_ours_bit_for_bit(safe: bool, tied: bool, tmp_path: Path) -> None:
    model = SMALL.model_copy(update={"tie_embeddings": tied})
    original = made(shape_of(model), seed=7)
    save_as_colossal(tmp_path / "colossal", shape_of(model), original, safe)
    brought = taken_in(tmp_path / "colossal", tmp_path / "out")
    assert (brought.startable, any("nothing in them was run" in note for note in brought.notes)) == (True, not safe)
    assert same_weights(started_from(tmp_path / "out", shape_of(model)), original)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: torch.save({"a": print}, f / "pytorch_model-00001.bin"), "which no plain checkpoint needs"),
        (lambda f: torch.save([torch.zeros(2)], f / "pytorch_model-00001.bin"), "else than a table of tensors"),
        (lambda f: (f / "pytorch_model-00002.bin").unlink(), "cannot be read"),
        (lambda f: (f / "pytorch_model-00002.bin").write_bytes(b"PK" * 99), "damaged, or not what torch.save writes"),
        (lambda f: torch.save({}, f / "pytorch_model-00002.bin"), "which no file has"),
        (lambda f: flip(f / "pytorch_model-00001.bin"), "CRC-32 does not match"),
    ],
)
def test_a_pickle_that_asks_for_more_than_numbers_is_not_brought_in(
    damage: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    save_as_colossal(tmp_path / "colossal", shape_of(SMALL), made(shape_of(SMALL), seed=7), safe=False)
    damage(tmp_path / "colossal")
    with pytest.raises(DataError, match=said):
        taken_in(tmp_path / "colossal", tmp_path / "out")
    assert not list((tmp_path / "out").glob("step-*"))


def flip(file: Path) -> None:
    """A bit of the first tensor."""
    with zipfile.ZipFile(file) as archive:
        at = min(i.header_offset for i in archive.infolist() if "/data/" in i.filename)
    data = bytearray(file.read_bytes())
    data[at + 200] ^= 4
    file.write_bytes(data)


def test_weights_of_a_checkpoint_are_taken_alone(tmp_path: Path) -> None:
    original = made(shape_of(SMALL), seed=8)
    tensors = {f"model.{name}": t for name, t in original.state_dict().items()}
    optim = {f"optim.{name}.exp_avg": t for name, t in original.state_dict().items()}
    checkpoint.save(tmp_path / "run", 30, {**tensors, **optim}, {"spec": {"model": SMALL.model_dump(mode="json")}})
    brought = taken_in(tmp_path / "run", tmp_path / "out", weights_only=True)
    assert (brought.step, brought.tensors) == (30, len(tensors))
    assert brought.bytes < newest(tmp_path / "run").bytes / 1.9
    assert same_weights(started_from(tmp_path / "out", shape_of(SMALL)), original)


def test_ranks_read_the_slices_of_their_own_part_and_no_others(tmp_path: Path) -> None:
    shape = shape_of(SMALL.model_copy(update={"experts": Experts(count=4, top_k=2, ffn_dim=20), "family": "mixtral"}))
    original = made(shape, seed=9)
    tensors = {f"model.{name}": t for name, t in original.state_dict().items()}
    tensors |= {f"optim.{name}.exp_avg": t for name, t in original.named_parameters()}
    checkpoint.save(tmp_path / "run", 5, tensors, {}, piece_bytes=256)

    def work(rank: int, world: int) -> tuple[dict[str, torch.Tensor], int, int]:
        read_bytes = opened = 0
        read_slice, check_headers = boxes.read_slice, find.check_headers

        def looked(found: checkpoint.Found) -> None:
            nonlocal opened
            opened += 1
            check_headers(found)

        def counted(found: checkpoint.Found, name: str, s: Slice) -> torch.Tensor:
            nonlocal read_bytes
            data = read_slice(found, name, s)
            read_bytes += data.nbytes
            return data

        boxes.read_slice, find.check_headers = counted, looked
        model = made(shape, seed=99)
        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        load_weights(model, tmp_path / "run")
        state = model.state_dict()
        return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}, read_bytes, opened

    size_bytes = sum(t.nbytes for name, t in tensors.items() if name.startswith("model."))
    done = run_ranks(work, 2)
    for state, read_bytes, _ in done:
        assert same_bits(state, original.state_dict())
        assert size_bytes * 0.5 <= read_bytes < size_bytes * 0.6
    assert [opened for _, _, opened in done] == [1, 0], "rank 0 opens it, and sends the manifest"


Change = Callable[[dict[str, torch.Tensor]], object]
WRONG: dict[str, tuple[Change, dict[str, Any] | None, type[ShoalError], str]] = {
    "no shape": (lambda s: None, None, UsageError, r"names of torchtitan.*--like"),
    "a tensor too many": (
        lambda s: s.update({"layers.0.attention.q_norm.weight": torch.ones(8)}),
        {},
        DataError,
        r"has the tensor 'layers\.0\.attention\.q_norm\.weight', which a model of this shape has not",
    ),
    "a tensor missing": (
        lambda s: s.pop("layers.1.ffn_norm.weight"),
        {},
        DataError,
        r"lacks the tensor 'blocks\.1\.ffn_norm\.weight'",
    ),
    "another width": (lambda s: None, {"ffn_dim": 48}, DataError, r"'blocks\.0\.ffn\.gate\.weight' is \[40, 32\]"),
    "fewer layers": (lambda s: None, {"layers": 1}, DataError, r"has the tensor 'blocks\.1\.\S+' and 8 more"),
    "tied, and is not": (lambda s: None, {"tie_embeddings": True}, DataError, r"output\.weight that is not its tok_"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    change, fields, error, words = WRONG[case]
    like = None if fields is None else MODEL.model_copy(update=fields)
    state = titan(seed=1).state_dict()
    change(state)
    save_dcp(tmp_path / "dcp", state)
    with pytest.raises(error, match=words):
        taken_in(tmp_path / "dcp", tmp_path / "out", like)
    assert not checkpoint.published(tmp_path / "out")


def test_a_damaged_source_leaves_nothing_behind(tmp_path: Path) -> None:
    save_dcp(tmp_path / "dcp", {"a": torch.ones(1000), "b": torch.ones(1000)})
    (shard,) = (tmp_path / "dcp").glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[data.rindex(b"\x00\x00\x80\x3f" * 10)] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match="CRC-32"):
        taken_in(tmp_path / "dcp", tmp_path / "out")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_nothing_is_written_where_checkpoints_are(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "out", 1, {"w": torch.ones(2)}, {})
    save_dcp(tmp_path / "dcp", {"a": torch.ones(3)})
    with pytest.raises(UsageError, match="has checkpoints already"):
        taken_in(tmp_path / "dcp", tmp_path / "out")


def test_weights_that_do_not_fit_a_run_are_told_in_a_sentence(tmp_path: Path) -> None:
    tensors = {f"model.{name}": t for name, t in made(shape_of(SMALL), seed=8).state_dict().items()}
    checkpoint.save(tmp_path / "run", 3, tensors, {})
    wider = shape_of(SMALL.model_copy(update={"ffn_dim": 32}))
    with pytest.raises(CheckpointError, match=r"'blocks\.0\.ffn\.gate\.weight' is \[24, 16\], but .* \[32, 16\]"):
        started_from(tmp_path / "run", wider)
    del tensors["model.norm.weight"]
    checkpoint.save(tmp_path / "run", 4, tensors, {})
    with pytest.raises(CheckpointError, match=r"step-00000004-term-0 lacks the tensor 'norm\.weight'"):
        started_from(tmp_path / "run", shape_of(SMALL))
    assert same_weights(
        started_from(tmp_path / "run" / "step-00000003-term-0", shape_of(SMALL)), made(shape_of(SMALL), 8)
    )


def test_memory_is_that_of_a_shard_and_not_of_the_checkpoint(tmp_path: Path) -> None:
    """In a process of its own: 120 MB in shards of 4 MB, converted with room for a few of them."""
    save_dcp(tmp_path / "dcp", {f"w{i}": torch.ones(10, 100_000) for i in range(30)})

    def work(rank: int, world: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        taken_in(tmp_path / "dcp", tmp_path / "out")
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024

    (grown_mb,) = run_ranks(work, 1)
    assert newest(tmp_path / "out").bytes > 120e6
    assert grown_mb < 40


def test_experts_of_several_dtypes_become_one_that_holds_them_all(tmp_path: Path) -> None:
    experts = Experts(count=3, top_k=2, ffn_dim=8, balance_rate=0.0, balance_loss=0.0, z_loss=0.0)
    model = made(shape_of(SMALL.model_copy(update={"family": "mixtral", "experts": experts})), 1)
    save_folder(tmp_path / "hf", model.shape, model.state_dict())
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    halves = {n: t.bfloat16() for n, t in tensors.items() if ".experts.1." in n}
    save_file(tensors | halves, file, metadata={"format": "pt"})
    taken_in(tmp_path / "hf", tmp_path / "out")
    found = newest(tmp_path / "out")  # verified: its bytes are as many as its dtypes need
    started, direct = started_from(tmp_path / "out", model.shape), made(model.shape, 2)
    load_hf(direct, tmp_path / "hf")
    assert {e.dtype for e in found.manifest.tensors.values()} == {"F32"}
    assert all(torch.equal(a, b) for a, b in zip(started.parameters(), direct.parameters(), strict=True))


def test_weights_that_are_no_numbers_leave_no_checkpoint_behind(tmp_path: Path) -> None:
    model = made(shape_of(SMALL), 1)
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    save_folder(tmp_path / "hf", model.shape, model.state_dict())
    with pytest.raises(DataError, match="holds NaN or infinity"):
        taken_in(tmp_path / "hf", tmp_path / "out")
    assert checkpoint.newest(tmp_path / "out") is None
