"""Numbers from peers: payloads of codecs, states of the outer step, what stages of a pipeline send."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.json_values import encoded, mutated
from tests.fuzz.raw_bytes import damaged, spliced
from tests.fuzz.reader import Finding, Folder, Target, reader
from tests.fuzz.samples import one_file_of, texts_of

A, B, C = "aa" * 32, "bb" * 32, "cc" * 32


@reader("codecs", "codec.frame", "codec.dense", "codec.topk", quick=150, share=300)
def codecs(folder: Path) -> Target:
    import numpy as np

    from shoal.codec.api import codec, codec_of
    from shoal.codec.frame import NAMES, BadPayload

    rng = np.random.default_rng(1)
    vector = rng.standard_normal(300).astype(np.float32)
    samples = [codec(name, 64, 8).encode(vector) for name in NAMES]

    def read(data: bytes) -> None:
        into = np.zeros(300, np.float32)
        try:
            which = codec_of(data)
            which.add(data, into, 0.5)
        except BadPayload:
            if into.any():
                raise Finding("a payload is refused and half of it was added") from None
            raise
        norm, dot = which.decode_norm(data), which.dot(data, vector)
        if not (np.isfinite(into).all() and np.isfinite(norm) and np.isfinite(dot)):
            raise Finding("numbers that are none")

    def generate(rng: Random) -> bytes:
        return spliced(rng, samples) if rng.random() < 0.1 else damaged(rng, rng.choice(samples), head=40)

    return Target(generate, read, (BadPayload,))


@reader("codecs-plain", "codec.frame", quick=40, share=20)
def codecs_plain(folder: Path) -> Target:
    """Compiled and plain code take and refuse the same payloads, and make the same bits of them."""
    import numpy as np

    from shoal.codec.api import codec
    from shoal.codec.frame import NAMES, BadPayload

    vector = np.random.default_rng(2).standard_normal(130).astype(np.float32)
    samples = [codec(name, 64, 8).encode(vector) for name in NAMES]

    def one(data: bytes, name: str, plain: bool) -> bytes | None:
        into = np.zeros(130, np.float32)
        try:
            codec(name, 64, 8, plain=plain).add(data, into, 0.5)
        except BadPayload:
            return None
        return into.tobytes()

    def read(data: bytes) -> None:
        for name in NAMES:
            if one(data, name, False) != one(data, name, True):
                raise Finding(f"{name}: compiled and plain code differ")

    return Target(lambda rng: damaged(rng, rng.choice(samples), head=30), read, (BadPayload,))


@reader("outer-state", "swarm.outer.state_files", quick=100, share=20)
def outer_state(folder: Path) -> Target:
    import numpy as np

    from shoal.swarm.outer import state_files
    from shoal.swarm.outer.outer import Outer
    from shoal.swarm.outer.rule import Rule

    rule = Rule()
    theta = np.arange(20, dtype=np.float32)
    good = folder / "good"
    state_files.save(Outer(theta, rule, 3, np.ones(20, np.float32) if rule.momentum else None), good)
    files = Folder({name: (good / name).read_bytes() for name in state_files.FILES})

    def read(case: Folder) -> None:
        if not np.isfinite(state_files.load(case.write(_emptied(folder / "one")), rule, 20).theta).all():
            raise Finding("weights that are not finite")

    return Target(lambda rng: one_file_of(files, ["outer.json"], rng), read, (state_files.BadSnapshot,))


@reader("stage-squeeze", "stages.squeeze", quick=200, share=50)
def stage_squeeze(folder: Path) -> Target:
    import torch

    from shoal.stages.squeeze import BadPayload, Squeeze

    names = ("fp32", "bf16", "int8", "int4", "int2")
    forms = {name: Squeeze(name, 32) for name in names}
    values = torch.linspace(-2, 2, 64).reshape(2, 32)
    samples = {name: form.encode(values) for name, form in forms.items()}

    def generate(rng: Random) -> Any:
        name = rng.choice(names)
        return [name, damaged(rng, samples[name]).hex()]

    def read(case: Any) -> None:
        if not torch.isfinite(forms[case[0]].decode(bytes.fromhex(case[1]), (2, 32))).all():
            raise Finding("hidden states that are not finite are taken")

    return Target(generate, read, (BadPayload,))


PLAN: dict[str, Any] = {
    "term": 1,
    "number": 2,
    "era": 0,
    "step": 3,
    "members": [A, B],
    "routes": [[0, 1], [0, 1]],
    "names": [A, B],
    "learners": {C: B},
    "commit": {"step": 2, "factor": 0.5, "loss": 2.0, "norm": 1.0},
    "lead": A,
    "phase": 4,
    "sums": {"step": 3, "losses": [2.5], "targets": [7]},
}
REPORT: dict[str, Any] = {
    "born": "b",
    "run": "r",
    "at": 3,
    "era": 0,
    "order": [1, 2],
    "saved": [0, 2],
    "lost": False,
    "seconds": 0.5,
    "ready": {"order": [1, 2], "square": 4.0, "loss": 2.0, "digest": "ab", "measured": [[4, 2.5, 7]]},
    "plan": PLAN,
}


@reader(
    "stage-messages",
    "stages.report",
    "stages.routes",
    "stages.peer",
    "stages.inbox",
    "stages.lead",
    quick=1000,
    share=400,
)
def stage_messages(folder: Path) -> Target:
    from shoal.net.api import Message
    from shoal.stages.handover import read_offer
    from shoal.stages.report import Report, read_where
    from shoal.values import BadValue, read_object

    good = {"step": 3, "bytes": 100, "digest": "ab"}

    def read(data: bytes) -> None:
        message = Message("where", read_object(data))
        if "digest" in message.fields:
            offer = read_offer(message, 1000)
            if offer is not None and not 0 <= offer.size <= 1000:
                raise Finding("a state without an end")
            return
        report, plan = read_where(message)
        if Report.of_json(json.loads(json.dumps(report.to_json()))) != report:
            raise Finding("a report that is another after a round trip")
        if plan is not None:
            plan.fits(((A, C), (B,)), 2, 9, sets=1)

    return Target(texts_of(REPORT, REPORT, good), read, (BadValue,))


@reader("stage-state", "stages.layers", "stages.before", "stages.handover", quick=100, share=20)
def stage_state(folder: Path) -> Target:
    """The state of a stage, as a sibling hands it over or an earlier Shoal has saved it: all of it or nothing."""
    import torch
    from safetensors.torch import save

    from shoal.errors import ShoalError
    from shoal.stages.before import read_old
    from shoal.stages.layers import StageLayers
    from shoal.values import BadValue

    held = {"w": torch.ones(3, 2), "m": torch.zeros(4)}
    good = save({name: t * 2 for name, t in held.items()})

    def generate(rng: Random) -> bytes:
        size = int.from_bytes(good[:8], "little")
        if rng.random() < 0.5:
            text = encoded(mutated(rng, json.loads(good[8 : 8 + size])))
            return len(text).to_bytes(8, "little") + text + good[8 + size :]
        return damaged(rng, good, head=size + 8)

    def read(data: bytes) -> None:
        mine = {name: t.clone() for name, t in held.items()}
        layers = StageLayers.__new__(StageLayers)
        layers._tensors = lambda: mine  # type: ignore[method-assign]
        (folder / "step.safetensors").write_bytes(data)
        state, _ = read_old(folder / "step.safetensors", 1 << 20)
        layers._take(state)
        if not all(torch.isfinite(t).all() for t in mine.values()):
            raise Finding("a state that is not finite is taken")

    return Target(generate, read, (ShoalError, BadValue))


@reader("stage-peers-file", "stages.__main__", quick=200, share=40)
def stage_peers_file(folder: Path) -> Target:
    from shoal.errors import SpecError
    from shoal.spec import Run
    from shoal.stages.__main__ import peers_of

    run = Run.model_validate(
        {"name": "d", "data": {"train": "x"}, "train": {"steps": 3}, "swarm": {"stages": {"count": 2}}}
    )
    good = [[{"id": A, "tcp": ["a:1"]}], [{"id": B, "tcp": ["b:1"]}, {"id": C, "tcp": ["c:2"]}]]
    file = folder / "peers.json"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        layout, addresses = peers_of(file, run)
        if (
            not all(isinstance(p, str) for stage in layout for p in stage)
            or not {p for s in layout for p in s} <= addresses.keys()
        ):
            raise Finding("peers without an address")

    return Target(texts_of(good), read, (SpecError,))


@reader(
    "islands",
    "islands.trade",
    "islands.cut",
    "islands.epoch",
    "islands.enter",
    "islands.lines",
    "islands.member",
    quick=300,
    share=60,
)
def islands(folder: Path) -> Target:
    """What islands of a run write into its folder and send each other."""
    from shoal.errors import ShoalError
    from shoal.islands.cut import _told
    from shoal.islands.enter import _here
    from shoal.islands.epoch import Fence
    from shoal.islands.member import Frozen
    from shoal.islands.trade import Gone, _parsed
    from shoal.values import BadValue, read_object

    card = {"key": "k", "island": 0, "control": "a:1", "data": ["a:2"], "host": "h", "pid": 5}
    good: dict[str, Any] = {
        "e": {
            "number": 1,
            "members": [card],
            "base": 0,
            "have": {"k": [0]},
            "left": {"l": "gone"},
            "joined": ["k"],
            "by": "k",
            "life": 1,
            "noticed": 1.5,
            "back": {"step": 3},
        },
        "h": {"card": card, "step": 3, "digest": "ab", "ended": 0},
        "c": {"cut": [0, 1], "until": 1e10},
        "f": {"state": {"applied": 3, "held": 4, "have": [0], "behind": False}, "hears": ["k"], "unknown": False},
        "t": {"step": 3, "nodes": [[0, 1]], "says": {"loss": 2.5}},
    }
    fence = Fence(folder)
    (folder / "epochs").mkdir()
    (folder / "here").mkdir()

    def generate(rng: Random) -> bytes:
        kind = rng.choice(tuple(good))
        text = encoded(mutated(rng, good[kind]))
        return kind.encode() + (text if rng.random() < 0.85 else damaged(rng, text))

    def read(data: bytes) -> None:
        kind, text = data[:1], data[1:]
        if kind == b"e":
            (folder / "epochs" / "000001.json").write_bytes(text)
            fence.newest()
        elif kind == b"h":
            (folder / "here" / "k.json").write_bytes(text)
            list(_here(folder))
        elif kind == b"c":
            (folder / "cut.json").write_bytes(text)
            _told(folder / "cut.json", 0)
        elif kind == b"f":
            Frozen.of(read_object(text))
        else:
            _parsed(1, bytearray(text), 3, 2)

    return Target(generate, read, (ShoalError, Gone, BadValue))


def _emptied(folder: Path) -> Path:
    if folder.exists():
        for path in folder.iterdir():
            path.unlink()
    return folder
