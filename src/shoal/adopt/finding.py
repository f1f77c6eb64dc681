"""What the doctor finds, and the list of all rules: how much each hurts and what to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

WRONG, RESUME, RISK, HINT = "wrong", "resume", "risk", "hint"
HURTS = {
    WRONG: "the training is wrong, or hangs",
    RESUME: "it does not go on as it was",
    RISK: "it breaks elsewhere, or can be abused",
    HINT: "it could be faster",
}
CONFIRMED, UNCONFIRMED, REFUTED = "confirmed", "unconfirmed", "refuted"


@dataclass(frozen=True)
class Rule:
    hurts: str
    do: str


RULES = {
    "one-rank-collective": Rule(WRONG, "call it on every rank, outside of the `if`"),
    "zero-grad": Rule(WRONG, "call optimizer.zero_grad() once for each step"),
    "train-mode": Rule(WRONG, "call model.train() after the evaluation, inside the loop"),
    "accumulation": Rule(WRONG, "divide the loss by the number of micro-batches before backward"),
    "ddp-sampler": Rule(WRONG, "give the loader a DistributedSampler, and call its set_epoch in each epoch"),
    "optimizer-early": Rule(WRONG, "make the optimizer after the model has been moved and wrapped"),
    "two-processes": Rule(WRONG, "start it with `shoal run --processes 2` and read its logs"),
    "sampler-epoch": Rule(WRONG, "call sampler.set_epoch(epoch) at the start of each epoch"),
    "checkpoint-optimizer": Rule(RESUME, "save optimizer.state_dict() in it, and load it"),
    "checkpoint-position": Rule(RESUME, "save the step or epoch in it, and begin there"),
    "checkpoint-schedule": Rule(RESUME, "save the schedule's state_dict() in it, and load it"),
    "checkpoint-scaler": Rule(RESUME, "save the scaler's state_dict() in it, and load it"),
    "checkpoint-rng": Rule(RESUME, "save torch.get_rng_state() and the like in it, and set them; or use shoal.attach"),
    "order-lost": Rule(RESUME, "skip the batches that were read (or use shoal.attach, which does)"),
    "not-resumed": Rule(RESUME, "compare what is saved with what is made; or use shoal.attach"),
    "not-repeated": Rule(RESUME, "seed every source of random numbers; torch.use_deterministic_algorithms(True) helps"),
    "no-seed": Rule(RESUME, "call torch.manual_seed(…) before the model is made"),
    "non-atomic-save": Rule(RESUME, "write to another name and os.replace it (`shoal run` does that by itself)"),
    "unsafe-load": Rule(RISK, "use torch.load(…, weights_only=True), safetensors or JSON"),
    "absolute-path": Rule(RISK, "take it from an argument or an environment variable"),
    "fixed-world": Rule(RISK, "take it from WORLD_SIZE, RANK and LOCAL_RANK, as torchrun and `shoal run` set them"),
    "dormant": Rule(RISK, "move to DistributedDataParallel or fully_shard of PyTorch (docs/guide/scripts.md says how)"),
    "host-sync": Rule(HINT, "read the value every N steps, or keep the sum on the device"),
    "loader-workers": Rule(HINT, "give the loader num_workers, and pin_memory=True"),
    "no-autocast": Rule(HINT, "run the forward under torch.autocast('cuda', dtype=torch.bfloat16)"),
}
_ORDER = {name: place for place, name in enumerate(RULES)}


@dataclass(frozen=True)
class Finding:
    rule: str
    file: str
    line: int
    reason: str  # one sentence
    also: tuple[int, ...] = ()  # more lines of the same
    confidence: str = UNCONFIRMED
    measured: str = ""  # what was seen, where something was measured

    @property
    def hurts(self) -> str:
        return RULES[self.rule].hurts

    @property
    def is_defect(self) -> bool:
        return self.hurts != HINT and self.confidence != REFUTED

    def as_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "file": self.file,
            "line": self.line,
            "also": list(self.also),
            "hurts": self.hurts,
            "reason": self.reason,
            "do": RULES[self.rule].do,
            "confidence": self.confidence,
            "measured": self.measured,
        }


def merged(found: list[Finding]) -> list[Finding]:
    """What hurts most first; the same thing in one file once, with its other lines."""
    kept: dict[tuple[str, str, str], Finding] = {}
    for one in sorted(found, key=lambda f: (_ORDER[f.rule], f.file, f.line)):
        key = one.rule, one.file, one.reason
        if key not in kept:
            kept[key] = one
        elif one.line != (first := kept[key]).line and one.line not in first.also:
            kept[key] = replace(first, also=(*first.also, one.line))
    return list(kept.values())
