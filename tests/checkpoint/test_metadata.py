"""A checkpoint's metadata grows with its tensors and its bytes, not with tensors times ranks; counted, not timed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint import layouts
from tests.checkpoint.layouts import as_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shoal import checkpoint
from shoal.checkpoint import Name, grids, loading, rows
from shoal.checkpoint.blocks import file_of
from shoal.checkpoint.grids import Cut, Grid, boxes_at, count_at, places_in, tiles
from shoal.checkpoint.layout import local_of
from shoal.checkpoint.manifest import Corrupt, Manifest, decode, encode, seal
from shoal.checkpoint.part import Part, decode_part, encode_part, pack
from shoal.checkpoint.publish import manifest_of
from shoal.checkpoint.rows import Layout
from shoal.checkpoint.saving import contents_of
from shoal.errors import CheckpointError

NAME = Name(100, 1)
HEADER_BYTES = 64
BLOCK_BYTES = 1 << 20


def shapes_of(blocks: int) -> dict[str, tuple[int, ...]]:
    """A model of many like blocks, and AdamW's moments."""
    model = {"embed": (32_000, 512), "norm": (512,)}
    for i in range(blocks):
        model |= {f"blocks.{i}.wq": (512, 512), f"blocks.{i}.up": (2048, 512), f"blocks.{i}.norm": (512,)}
    moments = {f"optim.{n}.{key}": s for n, s in model.items() for key in ("exp_avg", "exp_avg_sq")}
    return {f"model.{n}": s for n, s in model.items()} | moments


def laid_out(shapes: dict[str, tuple[int, ...]], world: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world,))
    return {
        name: distribute_tensor(torch.empty(shape, device="meta"), mesh, [Shard(0)], src_data_rank=None)
        for name, shape in shapes.items()
    }


def parts_of(blocks: int, world: int) -> list[bytes]:
    with as_rank(0, world):
        contents = contents_of(laid_out(shapes_of(blocks), world))
    sizes = contents.layout.sizes()
    parts = []
    for rank in range(world):
        size = HEADER_BYTES + sizes[rank]
        digests = rank.to_bytes(16, "big") * len(range(HEADER_BYTES, size, BLOCK_BYTES))
        file = file_of(size, HEADER_BYTES, "0" * 32, BLOCK_BYTES, digests)
        parts.append(encode_part(Part(rank, world, file, contents.packed)))
    return parts


def saved_by(blocks: int, world: int) -> Manifest:
    return manifest_of(NAME, [decode_part(part) for part in parts_of(blocks, world)], {"step": NAME.step})


def test_a_rank_more_costs_the_manifest_its_file_and_not_a_row_a_tensor() -> None:
    """A file: its name, its sizes, a checksum of its header, and one for each MiB or part of one."""
    small, large = (len(encode(saved_by(10, world))) for world in (64, 1024))
    assert (large - small) / (1024 - 64) < 200
    few, many = (len(encode(saved_by(blocks, 1024))) for blocks in (10, 40))
    tensors = 3 * 3 * (40 - 10)
    assert 40 * tensors < many - few < 100 * tensors, "a line a tensor, however many ranks"


def test_each_rank_says_what_is_much_shorter_than_its_tensors_are_many() -> None:
    eight, thousand = (len(parts_of(10, world)[-1]) for world in (8, 1024))
    assert thousand <= eight + 16
    assert thousand < 4096


def test_putting_a_thousand_parts_together_looks_at_what_they_say_alike_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: Counter[str] = Counter()
    unpacked = rows.Layout.__init__

    def init(self: Layout, *args: object, **kwargs: object) -> None:
        counted["layouts"] += 1
        unpacked(self, *args, **kwargs)  # type: ignore[arg-type]

    parts = [decode_part(part) for part in parts_of(10, 1024)]
    monkeypatch.setattr(rows.Layout, "__init__", init)
    grids.count_at.cache_clear()
    whole = manifest_of(NAME, parts, {})
    assert counted["layouts"] <= 2, "what all say, and the whole"
    kinds = len({(e.dtype, e.shape) for e in whole.tensors.values()})
    assert grids.count_at.cache_info().misses <= kinds * 1024, "kinds of tensors times ranks, not tensors times ranks"


def test_a_rank_of_a_thousand_derives_its_own_rows_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    world, shapes = 1024, shapes_of(10)
    data = encode(saved_by(10, world))
    counted: Counter[str] = Counter()
    real = rows.Slice.__init__

    def init(self: rows.Slice, *args: object, **kwargs: object) -> None:
        counted["slices"] += 1
        real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(rows.Slice, "__init__", init)
    for ranks, files in ((world, 1), (world // 2, 2)):
        with as_rank(ranks - 3, ranks):
            mine = laid_out(shapes, ranks)
            counted.clear()
            sent = decode(data, checked=True)
            wanted = loading._wanted(sent, mine)
            reads = loading._reads(sent, wanted)
        # The vectors of 512 are cut over 512 ranks in both: the rows of a rank lie in one other file.
        assert len({read.file for read in reads}) <= files + 1
        assert counted["slices"] <= 2 * (files + 1) * len(shapes)
        local = sum(t.to_local().nbytes for t in mine.values() if isinstance(t, DTensor))
        assert sum(want.bytes for want in wanted) == local
        assert sum(read.end - read.begin for read in reads) <= local + 2 * BLOCK_BYTES * (files + 1)


# What is derived is what is there


cuts = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4), st.integers(1, 3)), max_size=3)


@settings(max_examples=80, deadline=None)
@given(st.tuples(st.integers(0, 9), st.integers(1, 7)), cuts, st.data())
def test_the_places_of_a_grid_cover_a_tensor_once_and_are_found_by_any_box(
    shape: tuple[int, int], cut: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    grid = tuple(Cut(*each) for each in cut)
    places = range(torch.Size([c.parts for c in grid]).numel())
    boxes = {place: boxes_at(shape, grid, place) for place in places}
    everything = [(box.offset, box.shape) for place in places for box in boxes[place]]
    assert tiles(shape, everything) or not shape[0]
    for place in places:
        assert count_at(shape, grid, place) == sum(torch.Size(box.shape).numel() for box in boxes[place])
    if shape[0]:
        offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        size = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
        holding = {p for p in places for b in boxes[p] if grids.intersect(offset, size, b.offset, b.shape)}
        assert holding <= set(places_in(shape, grid, offset, size)) <= set(places)


def test_every_kind_of_mesh_is_written_and_read_as_it_is_laid_out(tmp_path: Path) -> None:
    layouts.write(tmp_path)
    found = checkpoint.newest(tmp_path, verify=True)
    assert found is not None
    layouts.assert_all_values(found)
    assert max(len(file.starts) for file in found.manifest.files.values()) > 3, "several blocks"
    listed = [(s.file, s.at) for name in layouts.STATE for s in found.manifest.rows.slices(name)]
    in_files = [(s.file, s.at) for file in found.manifest.files for _, _, s in found.manifest.rows.in_file(file)]
    assert sorted(listed) == sorted(in_files)
    for rank in range(layouts.WORLD):
        with as_rank(rank):
            wanted, _ = layouts.state_of(rank)
            mine, _ = layouts.state_of(rank)
            for tensor in mine.values():
                local_of(tensor).zero_()
            loading._fill(found, mine)
            assert all(torch.equal(local_of(mine[name]), local_of(wanted[name])) for name in wanted)


def test_a_flipped_bit_is_named_by_file_place_and_tensors(tmp_path: Path) -> None:
    layouts.write(tmp_path)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    s = next(found.manifest.rows.slices("model.strided"))
    path = tmp_path / str(found.name) / s.file
    data = bytearray(path.read_bytes())
    data[s.at + 5] ^= 2
    path.write_bytes(data)
    (said,) = checkpoint.damage(found)
    begin, end = found.manifest.files[s.file].around(s.at + 5, s.at + 6)
    assert "'model.strided'" in said
    assert f"in {s.file} are not those" in said
    assert f"{end - begin} bytes from byte {begin} on" in said
    with pytest.raises(Corrupt, match="checksum does not match"):
        checkpoint.read_full(found, prefix="")


# What ranks say that does not fit


def entry(cut: Grid | None, *shape: int) -> rows.Entry:
    return rows.Entry("F32", shape, cut)


TWO = Grid((Cut(0, 2),), (0, 1))
WRONG: dict[str, tuple[list[dict[str, rows.Entry]], str]] = {
    "a rank that is to write and does not know": ([{"w": entry(TWO, 4)}, {}], "'w' do not cover it exactly once"),
    "nobody writes": ([{"w": entry(None, 4)}, {"w": entry(None, 4)}], "'w' do not cover it exactly once"),
    "two writers": (
        [{"w": entry(grids.alone(0), 4)}, {"w": entry(grids.alone(1), 4)}],
        "do not agree on who writes tensor 'w'",
    ),
    "two shapes": ([{"w": entry(TWO, 4)}, {"w": entry(TWO, 5)}], "the dtype and shape of tensor 'w'"),
    "a file that is too small": ([{"w": entry(TWO, 8)}] * 2, "bytes in manifest.json, and its header and tensors"),
}


@pytest.mark.parametrize("case", WRONG)
def test_parts_that_do_not_fit_are_not_published(case: str) -> None:
    said, words = WRONG[case]
    file = file_of(HEADER_BYTES + 8, HEADER_BYTES, "0" * 32, BLOCK_BYTES, bytes(16))
    written = [Layout(tensors) for tensors in said]
    with pytest.raises(CheckpointError, match=words):
        manifest_of(NAME, [Part(rank, 2, file, pack(layout)) for rank, layout in enumerate(written)], {})


def resealed(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    head = data.rpartition(b",")[0].replace(old, new, 1)
    return head + seal(head)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"world":4', b'"world":5'),
        (b'"world":4', b'"world":4000000000'),
        (b'"block_bytes":64', b'"block_bytes":0'),
        (b'"block_bytes":64', b'"block_bytes":60'),
        (b'"block_bytes":64', b'"block_bytes":128'),
        (b'"cuts":[[0,4,1]]', b'"cuts":[[0,1000000000,1]]'),
        (b'"cuts":[[0,4,1]]', b'"cuts":[[7,4,1]]'),
        (b'"cuts":[[0,4,1]]', b'"cuts":[[0,4,-1]]'),
        (b'{"first":0,"steps":[1]}', b'{"first":9,"steps":[1]}'),
        (b'{"first":0,"steps":[1]}', b"[0,0,0,0]"),
        (b'"dtype":"BF16"', b'"dtype":"BF17"'),
        (b'"shape":[7,3]', b'"shape":[-7,3]'),
        (b'"shape":[7,3]', b'"shape":[70000000,3]'),
        (b'"grid":0', b'"grid":99'),
        (b'"blocks":"', b'"blocks":"!'),
    ],
)
def test_a_manifest_with_numbers_that_cannot_be_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    layouts.write(tmp_path)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert decode(found.manifest.data).layout == found.manifest.layout
    with pytest.raises(Corrupt):
        decode(resealed(found.manifest.data, old, new))
