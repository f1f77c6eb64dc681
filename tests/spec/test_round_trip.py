"""What `dump` writes, `load` reads: for any run, whatever its values look like in YAML."""

from __future__ import annotations

import tempfile
from pathlib import Path

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.spec import Run, dump, load
from shoal.spec.presets import presets

# Text that YAML readers like to take for something else, and any other printable text.
TRAPS = [
    "1e5",
    "10_000",
    "0x10",
    "0o7",
    "off",
    "yes",
    "null",
    "~",
    "true",
    "1:30",
    "2026-01-01",
    ".5",
    "=",
    "a: b",
    "#a",
    "- x",
]
TEXT = st.one_of(st.sampled_from(TRAPS), st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1))
COUNT_OR_AUTO = st.one_of(st.integers(1, 8), st.just("auto"))
PATHS = TEXT.filter(lambda t: "://" not in t).map(lambda t: "/data/" + t.strip("/ .") + "x")
SHARE = st.floats(1e-9, 1e9)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    paths = draw(st.lists(PATHS, min_size=2, max_size=4, unique=True))
    heads = draw(st.integers(1, 8))
    steps = draw(st.integers(10, 10**9))
    model = {
        "heads": heads,
        "dim": heads * draw(st.sampled_from([8, 16, 64])),
        "layers": draw(st.integers(1, 100)),
        "vocab_size": draw(COUNT_OR_AUTO),
        "ffn_dim": draw(COUNT_OR_AUTO),
        "norm_eps": draw(st.floats(1e-12, 1.0)),
        "rope_theta": draw(st.floats(1, 1e9)),
        "init_std": draw(st.floats(1e-6, 1)),
        "tie_embeddings": draw(st.booleans()),
        "preset": draw(st.sampled_from([None, *presets()])),
        "max_seq_len": 4096,
        "rope_scaling": draw(st.none() | st.builds(lambda f: {"kind": "linear", "factor": f}, st.floats(1, 100))),
        "experts": draw(st.sampled_from([None, {"count": 4, "top_k": 2, "ffn_dim": 8}])),
    }
    sources = [{"path": path, "weight": draw(SHARE)} for path in paths]
    return Run.model_validate(
        {
            "name": draw(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")),
            "seed": draw(st.integers(0, 2**63 - 1)),
            "model": model,
            "data": {"train": sources[1:], "eval": paths[:1], "seq_len": draw(st.integers(1, 4096))},
            "train": {
                "steps": steps,
                "clip": draw(st.none() | SHARE),
                "optimizer": {"lr": draw(SHARE), "betas": draw(st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)))},
                "schedule": {"warmup_steps": draw(st.integers(0, 9))},
            },
            "checkpoint": {
                "every": draw(
                    st.integers(0, 999) | st.just("auto") | st.integers(1, 10**7).map(lambda ms: f"{ms / 1000} s")
                ),
                "memory": draw(COUNT_OR_AUTO | st.just("off")),
                "remote": draw(st.sampled_from([None, "s3://bucket", "file:///disk/0x10"])),
            },
            "track": {
                "experiment": draw(TEXT),
                "mlflow": draw(st.booleans() | st.just("http://host:1")),
                "wandb": draw(st.sampled_from(["off", "online", "offline"])),
            },
        }
    )


@settings(max_examples=60, deadline=None)
@given(runs())
def test_what_dump_writes_load_reads_back_equal(run: Run) -> None:
    text = dump(run)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(text, encoding="utf-8")
        loaded = load(file)
    assert loaded.run == run
    assert set(loaded.origins.values()) <= {f"run.yaml:{n}" for n in range(text.count("\n") + 1)}
    # Other readers of the run directory see the same values, though they follow older rules of YAML.
    assert Run.model_validate(yaml.safe_load(text)) == run
