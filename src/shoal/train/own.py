"""Own code of a run, made ready: its hooks with what a checkpoint holds of them, its schedule, its loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import SpecError
from shoal.own.code import Code
from shoal.spec.run import Run
from shoal.train.hooks import Hook

MOST_BYTES = 1 << 20  # of the state of all hooks, as JSON


@dataclass(frozen=True)
class Own:
    named: Mapping[str, Hook] = field(default_factory=dict)
    schedule: Callable[[int, int], Any] | None = None
    loop: Callable[..., Any] | None = None
    first: Mapping[str, Any] = field(default_factory=dict)  # the hooks' states when they were made

    @classmethod
    def of(cls, code: Code, run: Run) -> Own:
        named: dict[str, Hook] = {}
        for name, make in zip(run.own.hooks, code.hooks, strict=True):
            hook = make(run)
            if not isinstance(hook, Hook):
                raise SpecError(f"own.hooks names {name}, which is no subclass of shoal.Hook.")
            named[name if name not in named else f"{name}#{len(named)}"] = hook
        made = cls(named, code.schedule, code.loop)
        return cls(named, code.schedule, code.loop, made.states())

    @property
    def hooks(self) -> list[Hook]:
        return list(self.named.values())

    def states(self) -> dict[str, Any]:
        """Of the hooks that have one: what a checkpoint holds. A copy."""
        found = {}
        for name, hook in self.named.items():
            if (state := hook.state()) is not None:
                found[name] = _as_json(name, state)
        return found

    def load(self, states: object) -> None:
        """The hooks stand as they did then; one that was not there stays as it is."""
        known = states if isinstance(states, dict) else {}
        for name, hook in self.named.items():
            if name in known:
                hook.load(known[name])

    def begin(self) -> None:
        """The hooks stand as at the beginning."""
        self.load(json.loads(json.dumps(self.first)))


def _as_json(name: str, state: Any) -> Any:
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise SpecError(
            f"own.hooks: state() of {name} is no JSON ({e}): give numbers, texts, lists and dicts."
        ) from None
    if len(text) > MOST_BYTES:
        raise SpecError(f"own.hooks: state() of {name} has {len(text):,} bytes, where {MOST_BYTES:,} are the most.")
    return json.loads(text)


NOTHING = Own()
