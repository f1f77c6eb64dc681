"""Places that parse nothing but what this very process, its own parent or child, or its own package wrote: why each."""

from __future__ import annotations

_CHILD = "a child process of this one, over its own pipe"
_RANKS = "tensors of the ranks of one run, over the process group that they have joined"
_LIBRARY = "figures in this package"
_MEMORY = "memory that this process has mapped itself"

OURS: dict[str, str] = {
    "bench.collectives:measure": _CHILD,
    "check.trained:Learning.read": "a worker of the check, in a folder of the check's own",
    "checkpoint.part:decode_contents": _CHILD,
    "model.hf_any:save_folder": "what transformers has just written for this process",
    "parallel.agree:first_error": _RANKS,
    "parallel.agree:bytes_from_rank_0": _RANKS,
    "parallel.agree:texts": _RANKS,
    "checkpoint.persister:main": "its parent, over its own pipe",
    "checkpoint.saver:Saver._read": _CHILD,
    "checkpoint.snapshot:_places": _MEMORY,
    "checkpoint.snapshot:_pin": _MEMORY,
    "checkpoint.snapshot:_unpin": _MEMORY,
    "data.prepare.workers:_Worker.messages": _CHILD,
    "data.prepare.workers:main": "its parent, over its own pipe",
    "data.prepare.readers_tables:_stream": "the library `datasets` reads it; its rows are of the generator `rows`",
    "data.prepare.table_look:_in_a_child": _CHILD,
    "data.prepare.table_look:main": "its parent, over its own pipe",
    "data.tokenizer:ByteTokenizer.encode_batch": "text that has been decoded already",
    "data.prepare.tokenizer_train:_in_a_child": _CHILD,
    "data.prepare.tokenizer_train:main": "its parent, over its own pipe",
    "data.word_ids:WordIds.encode": "ids that the tokenizer of this process made",
    "codec.dense:Dense.encode": "a header that it has just made",
    "emulate.wan:Wan.counters": _CHILD,
    "emulate.wan:Wan.carried": _CHILD,
    "emulate.wan:Wan.cpu_s": _CHILD,
    "parallel.inner:Inner.share": _RANKS,
    "net.tcp:counts": "the kernel's TCP_INFO",
    "islands.trade:Trader.sum.expect": "a length, of an island that knows the run's token; the header is `_parsed`",
    "launch.bundle:Bundle.tar": "written, not read",
    "launch.ray.driver:_secrets": "what the sender of this job has put aside for its driver",
    "launch.ray.submission:package": "written, not read",
    "observe.router:step_fields": "loads of experts, no parser",
    "observe.router:record": "loads of experts, no parser",
    "parallel.count:_gathered": _RANKS,
    "parallel.flight:flight_of.look": "torch in this process; what becomes of it is `flights`",
    "plan.constants:_file": _LIBRARY,
    "profile.__main__:main.do": "its parent, in a folder of its own",
    "profile.capture:_export": "written, not read",
    "train.balance:counted": "loads of experts, no parser",
    "train.balance:nudge": "loads of experts, no parser",
    "train.numerics:Past._everywhere": _RANKS,
    "swarm.trainer.keeper:Keeper._returned": "a file of this peer's trainer, in its own folder",
    "swarm.trainer.link:Link._read": "its own node, over a socket in a folder of theirs",
    "own.files:_read": "source code of the person's own, which the run executes; bounded in files and bytes",
    "train.own:Own.begin": "what it has just written itself",
    "train.own:_as_json": "what it has just written itself",
}
