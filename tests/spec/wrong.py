"""Wrong run files and overrides, each with what its error must say: `ALL` is the table."""

from __future__ import annotations

from dataclasses import dataclass

GOOD = """\
name: a-run
data:
  train: shards
train:
  steps: 100
"""


@dataclass(frozen=True)
class Wrong:
    what: str
    file: str | bytes  # what stands in run.yaml
    says: tuple[str, ...]  # each of these is part of the error
    overrides: tuple[str, ...] = ()
    code: int = 2


def _with(lines: str, *says: str) -> tuple[str, tuple[str, ...]]:
    return GOOD + lines, says


FILES = [
    Wrong("empty file", "", ("run.yaml is empty", "shoal init pretrain")),
    Wrong("only comments", "# nothing yet\n", ("run.yaml is empty",)),
    Wrong("a list", "- name: a\n", ("run.yaml:1:1", "lines of `name: value`")),
    Wrong("one word", "hello\n", ("run.yaml:1:1", "not a list or one value")),
    Wrong("not UTF-8", b"name: caf\xe9\n", ("run.yaml:1", "0xe9", "is not UTF-8")),
    Wrong("binary", b"\x80\x02\x7d\x71\x00", ("run.yaml:1", "is not UTF-8")),
    Wrong("control character", "name: a\nseed: \x07\n", ("run.yaml:2", "U+0007", "remove it")),
    Wrong("tab", "train:\n\tsteps: 3\n", ("run.yaml:2:1", "a tab indents this line", "only spaces")),
    Wrong("unclosed bracket", "name: a\ndata: {train: [x\n", ("run.yaml:3:1", "is not YAML")),
    Wrong("two colons", "name: a: b\n", ("run.yaml:1:8", "is not YAML", "mapping values are not allowed")),
    Wrong("two documents", GOOD + "---\nname: b\n", ("run.yaml:6:1", "second document")),
    Wrong("duplicate key", GOOD + "name: b\n", ("run.yaml:6:1", "name stands here and already on line 1")),
    Wrong("duplicate inside", "train:\n  steps: 1\n  steps: 2\n", ("run.yaml:3:3", "steps", "already on line 2")),
    Wrong("alias", "name: &n a\nseed: *n\n", ("run.yaml:1:7", "aliases", "write the value out")),
    Wrong("alias bomb", "a: &a [x, x]\nb: &b [*a, *a]\n", ("run.yaml:1:4", "aliases")),
    Wrong("python tag", "name: !!python/object/apply:os.system [ls]\n", ("run.yaml:1:7", "tags", "remove it")),
    Wrong("list as key", "? [a, b]\n: 1\n", ("run.yaml:1:3", "a key is a plain name")),
    Wrong("nested too deeply", "a: " + "[" * 1000, ("run.yaml", "nested too deeply")),
    Wrong("a data set", "x" * 2_000_000, ("run.yaml is 2,000,000 bytes", "too large for a run file")),
]

NAMES = [
    Wrong(
        "misspelt value", GOOD.replace("steps", "stpes"), ("run.yaml:5:3", "train.stpes", "did you mean train.steps?")
    ),
    Wrong("misspelt section", GOOD + "modle: {dim: 64}\n", ("run.yaml:6:1: modle", "did you mean model?")),
    Wrong("wrong section", GOOD + "steps: 5\n", ("run.yaml:6:1: steps", "steps belongs under train")),
    Wrong("one level too high", GOOD + "  lr: 1e-3\n", ("run.yaml:6:3: train.lr", "lr belongs under train.optimizer")),
    Wrong("in several sections", GOOD + "every: 5\n", ("run.yaml:6:1", "eval.every or checkpoint.every")),
    Wrong("another trainer's name", GOOD + "learning_rate: 1\n", ("run.yaml:6:1", "Shoal calls it train.optimizer.lr")),
    Wrong("another trainer's start", GOOD + "initializer_range: 1\n", ("Shoal calls it model.init_std.",)),
    Wrong("another trainer's retention", GOOD + "save_total_limit: 1\n", ("Shoal calls it checkpoint.keep.",)),
    Wrong("dotted name", GOOD + "train.batch: 8\n", ("run.yaml:6:1", "write `batch:` inside the section `train:`")),
    Wrong("nothing like it", GOOD + "xyzzy: 1\n", ("run.yaml:6:1: xyzzy", "the names there are name, seed, model")),
    Wrong(
        "misspelt in a list",
        GOOD.replace("shards", "[{path: x, wieght: 2}]"),
        ("run.yaml:3:21", "data.train.0.wieght", "did you mean data.train.0.weight?"),
    ),
    Wrong("missing section", "name: a\n", ("run.yaml: train is missing", "add a section `train:` with `steps:`")),
    Wrong(
        "missing value",
        GOOD.replace("steps: 100", "batch: 8"),
        ("run.yaml:4:1: train.steps is missing", "whole number"),
    ),
    Wrong(
        "missing data",
        GOOD.replace("train: shards", "seq_len: 8"),
        ("run.yaml:2:1: data.train is missing; add `train:` with a folder", "(prepared token shards)."),
    ),
    Wrong(
        "missing data, and more",
        GOOD.replace("train: shards", "seq_len: 8") + "seed: many\n",
        ("run.yaml:2:1: data.train is missing; add `train:` with a folder", "run.yaml:6:1: seed is 'many'"),
    ),
    Wrong("misspelt override", GOOD, ("`train.stpes=3` on the command line", "train.steps?"), ("train.stpes=3",)),
    Wrong("override of a section", GOOD, ("`train=5`", "train is a section", "train.steps="), ("train=5",)),
    Wrong("override inside a value", GOOD, ("`seed.x=5`", "seed is one value"), ("seed.x=5",)),
    Wrong("override of no item", GOOD, ("data.train has 1 item", "count from 0"), ("data.train.1.weight=2",)),
    Wrong("override of a list", GOOD, ("data.train is a list", "data.train.0.weight"), ("data.train.weight=2",)),
    Wrong("override without a value", GOOD, ("an override is NAME=VALUE",), ("steps",)),
    Wrong("override that is no YAML", GOOD, ("`data.train=[a`", "brackets and quotes"), ("data.train=[a",)),
]

VALUES = [
    Wrong("text for a number", *_with("seed: many\n", "run.yaml:6:1: seed is 'many', but must be a whole number")),
    Wrong("truth for a number", *_with("  batch: true\n", "run.yaml:6:3: train.batch is true, but must be a whole")),
    Wrong("fraction of a step", GOOD.replace("100", "1.5"), ("run.yaml:5:3: train.steps is 1.5", "whole number")),
    Wrong("zero steps", GOOD.replace("100", "0"), ("run.yaml:5:3: train.steps is 0", "at least 1")),
    Wrong("nothing after the colon", GOOD.replace("100", ""), ("run.yaml:5:3: train.steps is empty", "at least 1")),
    Wrong("section for a value", GOOD.replace("100", "{a: 1}"), ("run.yaml:5:3: train.steps is a section",)),
    Wrong("value for a section", *_with("model: llama3-8b\n", "run.yaml:6:1: model is 'llama3-8b'", "such as preset")),
    Wrong("negative seed", GOOD, ("`seed=-1`", "seed is -1", "at least 0"), ("seed=-1",)),
    Wrong("infinite clip", GOOD, ("train.clip is inf", "a number above 0, or empty"), ("train.clip=.inf",)),
    Wrong("unknown choice", GOOD, ("is 'fp16'", "`fp32`, `bf16` or `fp8`"), ("train.precision=fp16",)),
    Wrong("no choice of ours", GOOD, ("track.wandb is 'on'", "`off`, `online` or `offline`"), ("track.wandb=on",)),
    Wrong(
        "beta of one", GOOD, ("[0.9, 1]", "2 numbers, each at least 0 and below 1"), ("train.optimizer.betas=[0.9,1]",)
    ),
    Wrong("one beta", GOOD, ("is 0.9, but must be a list of 2",), ("train.optimizer.betas=0.9",)),
    Wrong("bad run name", GOOD.replace("a-run", "a/run"), ("run.yaml:1:1: name is 'a/run'", "letters, digits")),
    Wrong("no data", GOOD.replace("shards", "[]"), ("run.yaml:3:3: data.train is []", "a folder")),
    Wrong("list in a list", GOOD, ("`data.train=[[a]]`", "data.train.0 is ['a']"), ("data.train=[[a]]",)),
    Wrong("no path", GOOD, ("`data.train=[{weight: 2}]`", "0.path is missing"), ("data.train=[{weight: 2}]",)),
    Wrong("weight of zero", GOOD, ("data.train.0.weight is 0", "above 0"), ("data.train.0.weight=0",)),
    Wrong(
        "time without a unit anybody knows",
        *_with(
            "checkpoint: {every: 10 parsecs}\n", "run.yaml:6:14: checkpoint.every is '10 parsecs'", "`auto`, a number"
        ),
    ),
    Wrong("no time at all", GOOD, ("is '0 s', but must be `auto`", "(0: at the end only)"), ("checkpoint.every=0 s",)),
    Wrong("half a step", GOOD, ("checkpoint.every is 0.5", "such as `30 s`"), ("checkpoint.every=0.5",)),
    Wrong("an age", GOOD, ("checkpoint.every is '99999 h'",), ("checkpoint.every=99999 h",)),
    Wrong(
        "memory of a size",
        GOOD,
        ("is '4 GB', but must be a whole number of at least 1, `auto`, or `off`",),
        ("checkpoint.memory=4 GB",),
    ),
    Wrong("remote folder", GOOD, ("is '/x'", "`s3://bucket/prefix` or `file:///folder`"), ("checkpoint.remote=/x",)),
    Wrong("keys in an address", GOOD, ("`s3://bucket/prefix`",), ("checkpoint.remote=s3://key:secret@bucket/x",)),
    Wrong("unknown preset", *_with("model: {preset: lama3-8b}\n", "run.yaml:6:9", "'lama3-8b'", "mean llama3-8b?")),
    Wrong("no weights there", *_with("model: {weights: gone}\n", "run.yaml:6:9", "gone/config.json"), code=78),
]

RULES = [
    Wrong("dim over heads", *_with("model: {dim: 250}\n", "run.yaml:6:9", "model.heads 4", "use 248")),
    Wrong("odd head", GOOD, ("model.head_dim 33 is odd", "even"), ("model.head_dim=33",)),
    Wrong("odd head by division", GOOD, ("model.dim / model.heads = 63 is odd",), ("model.dim=252",)),
    Wrong("kv_heads", GOOD, ("model.kv_heads 3 does not divide model.heads 4", "1, 2, 4"), ("model.kv_heads=3",)),
    Wrong("preset and weights", GOOD, ("cannot both give the shape",), ("model.preset=tiny", "model.weights=/x")),
    Wrong(
        "batch over processes",
        GOOD,
        ("train.batch 32", "3 processes; train.batch 33 would do, and the nearest mesh that works is pp 3."),
        ("resources.processes=3",),
    ),
    Wrong("batch over mesh", GOOD, ("train.batch 32", "6 processes"), ("mesh.dp_shard=3", "mesh.dp_replicate=2")),
    Wrong(
        "batch over micro_batch",
        GOOD,
        ("mesh.micro_batch 5", "train.batch 30 would do", "works has micro_batch 4."),
        ("mesh.micro_batch=5",),
    ),
    Wrong(
        "mesh and processes",
        GOOD,
        (
            "`resources.processes=3`",
            "mesh.dp_replicate 2 x mesh.dp_shard 4 is 8 processes, but resources.processes is 3",
            "resources.processes 8 would do",
        ),
        ("mesh.dp_shard=4", "mesh.dp_replicate=2", "resources.processes=3"),
    ),
    Wrong(
        "half a mesh",
        GOOD,
        (
            "resources.processes 3 is not a multiple of mesh.dp_shard 2",
            "resources.processes 2 or 4 would do, and the nearest mesh that works is dp_shard 2, on 2 processes.",
        ),
        ("mesh.dp_shard=2", "resources.processes=3", "model.layers=1"),
    ),
    Wrong(
        "processes that tp does not divide",
        GOOD,
        (
            "`resources.processes=3`",
            "resources.processes 3 is not a multiple of mesh.tp 2; resources.processes 2 or 4 would do, "
            "and of 3 processes the nearest mesh that works is pp 3.",
        ),
        ("mesh.tp=2", "resources.processes=3"),
    ),
    Wrong(
        "more processes than the batch has windows for",
        GOOD,
        ("resources.processes 64 would do, and of 101 processes",),
        ("mesh.tp=2", "resources.processes=101", "model.layers=101"),
    ),
    Wrong(
        "no mesh of so many",
        GOOD,
        ("no mesh of 5 processes works, and the nearest that does is tp 4, on 4 processes.",),
        ("mesh.tp=3", "resources.processes=5", "train.batch=1"),
    ),
    Wrong("mesh name", GOOD, ("mesh.tpp is not a name", "did you mean mesh.tp?"), ("mesh.tpp=2",)),
    Wrong("another trainer's axis", GOOD, ("Shoal calls it mesh.tp",), ("mesh.tensor_parallel_size=2",)),
    Wrong("schedule name", GOOD, ("is '1f2b', but must be `auto`, `gpipe`, `1f1b`",), ("mesh.schedule=1f2b",)),
    Wrong("zero tp", GOOD, ("mesh.tp is 0, but must be a whole number of at least 1, or `auto`",), ("mesh.tp=0",)),
    Wrong(
        "tp in the file",
        *_with("mesh: {tp: 3}\n", "run.yaml:6:8: model.heads 4, model.kv_heads 4 and", "mesh.tp 3", "works is tp 4."),
    ),
    Wrong("tp over kv_heads", GOOD, ("model.kv_heads 2 cannot", "is tp 2."), ("mesh.tp=4", "model.kv_heads=2")),
    Wrong("tp over vocabulary", GOOD, ("vocab_size 50257 cannot", "is tp 1."), ("mesh.tp=2", "model.vocab_size=50257")),
    Wrong("cp over sequence", GOOD, ("seq_len 512 cannot", "6 equal pieces", "is cp 4."), ("mesh.cp=3",)),
    Wrong(
        "heads for all_to_all",
        GOOD,
        ("all_to_all cannot share the 4 heads and 4 kv_heads over mesh.cp 8", "is cp 8 with cp_method ring."),
        ("mesh.cp=8", "mesh.cp_method=all_to_all"),
    ),
    Wrong(
        "dynamic rope over cp",
        GOOD,
        ("kind dynamic needs the whole sequence", "is cp 1."),
        ("mesh.cp=2", "model.rope_scaling={kind: dynamic, factor: 2}"),
    ),
    Wrong("layers for pp", GOOD, ("model.layers 4 are fewer than the 8 stages", "is pp 4."), ("mesh.pp=8",)),
    Wrong(
        "layers for two stages each",
        GOOD,
        ("8 stages of mesh.pp 4 with mesh.schedule zbv", "is pp 4 with schedule 1f1b."),
        ("mesh.pp=4", "mesh.schedule=zbv"),
    ),
    Wrong(
        "too few micro-batches",
        GOOD,
        ("mesh.schedule 1f1b with mesh.pp 4 needs at least 4 micro-batches a step", "gives 2", "with micro_batch 8."),
        ("mesh.pp=4", "mesh.schedule=1f1b", "mesh.micro_batch=16"),
    ),
    Wrong(
        "uneven rounds",
        GOOD,
        ("interleaved with mesh.pp 2 needs micro-batches in equal rounds of at least 2", "gives 9"),
        ("mesh.pp=2", "mesh.schedule=interleaved", "train.batch=18", "mesh.micro_batch=2"),
    ),
    Wrong(
        "schedule without a pipeline",
        GOOD,
        ("mesh.schedule 1f1b orders a pipeline, and mesh.pp is 1", "works has schedule auto."),
        ("mesh.pp=1", "mesh.schedule=1f1b"),
    ),
    Wrong("ep of a dense model", GOOD, ("shares out experts, and the model has none", "has ep 1."), ("mesh.ep=2",)),
    Wrong(
        "ep over experts",
        GOOD,
        ("model.experts.count 8 cannot be split over mesh.ep 3", "is dp_shard 4 with ep 4."),
        ("mesh.ep=3", "model.experts={count: 8, top_k: 2, ffn_dim: 64}"),
    ),
    Wrong(
        "ep over processes",
        GOOD,
        ("mesh.ep 8 does not divide mesh.dp_shard 2 x mesh.tp 2 = 4", "is dp_shard 2 x tp 2 with ep 4."),
        ("mesh.ep=8", "mesh.dp_shard=2", "mesh.tp=2", "model.experts={count: 8, top_k: 2, ffn_dim: 64}"),
    ),
    Wrong(
        "copies in an island",
        GOOD,
        ("mesh.dp_replicate 2 makes copies inside an island, and fleet.islands 2 are copies already; set it to 1.",),
        ("mesh.dp_replicate=2", "fleet.islands=2"),
    ),
    Wrong(
        "shards for islands",
        GOOD,
        ("fleet.shards 3 must divide train.batch 32 and not be below fleet.islands 2",),
        ("fleet.shards=3", "fleet.islands=2"),
    ),
    Wrong(
        "one island",
        GOOD,
        (
            "fleet.deterministic has no effect",
            "one island alone is deterministic anyway",
        ),
        ("fleet.deterministic=true",),
    ),
    Wrong(
        "warm-up too long",
        GOOD,
        ("warmup_steps 100 is not below train.steps 100",),
        ("train.schedule.warmup_steps=100",),
    ),
    Wrong(
        "wsd too long",
        GOOD,
        ("warmup_steps 30", "decay of 80 steps exceed train.steps 100"),
        ("train.schedule.name=wsd", "train.schedule.warmup_steps=30", "train.schedule.decay_steps=80"),
    ),
    Wrong("eval without data", *_with("eval: {every: 5}\n", "run.yaml:6:8: eval.every 5", "set data.eval")),
    Wrong("best of none", GOOD, ("checkpoint.keep_best 2", "set data.eval"), ("checkpoint.keep_best=2",)),
    Wrong("eval on training data", GOOD, ("is also in data.train",), ("data.train=/x/y", "data.eval=/x/z/../y")),
    Wrong("window too long", GOOD, ("data.seq_len 8192", "model.max_seq_len 4096"), ("data.seq_len=8192",)),
    Wrong(
        "too many full layers",
        GOOD,
        ("model.full_attention_layers 5 is more than model.layers 4",),
        ("model.family=qwen2", "model.sliding_window=64", "model.full_attention_layers=5"),
    ),
    Wrong(
        "evaluated in more bits than there are",
        GOOD,
        ("eval.precision fp32 does not go with train.precision fp8", "set eval.precision to auto or bf16 or fp8"),
        ("train.precision=fp8", "eval.precision=fp32"),
    ),
    Wrong(
        "a router that learns nothing",
        GOOD,
        ("top_k 1 with model.experts.normalize true", "set model.experts.normalize to false, or", "top_k to 2"),
        ("model.experts={count: 8, top_k: 1, ffn_dim: 64}",),
    ),
    Wrong("top_k", GOOD, ("top_k 9", "8 experts"), ("model.experts={count: 8, top_k: 9, ffn_dim: 64}",)),
    Wrong(
        "no sparse layer",
        GOOD,
        ("dense_layers 4", "no layer of 4"),
        ("model.experts={count: 8, top_k: 2, ffn_dim: 64, dense_layers: 4}",),
    ),
    Wrong("llama3 rope", GOOD, ("needs original_max_seq_len",), ("model.rope_scaling={kind: llama3, factor: 8}",)),
    Wrong(
        "rope factors",
        GOOD,
        ("high_freq_factor 1 is not above low_freq_factor 1",),
        ("model.rope_scaling={kind: llama3, factor: 8, original_max_seq_len: 64, high_freq_factor: 1}",),
    ),
    Wrong(
        "mlflow host",
        GOOD,
        ("'localhost:5000' is no address", "http://localhost:5000"),
        ("track.mlflow=localhost:5000",),
    ),
    Wrong("mlflow password", GOOD, ("MLFLOW_TRACKING_PASSWORD",), ("track.mlflow=http://me:hunter2@host",)),
]

ALL = [*FILES, *NAMES, *VALUES, *RULES]
