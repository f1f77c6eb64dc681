"""`shoal checkpoint diff A B`: which tensors, which settings and which facts of the environment differ.

The exit code is about the tensors: 0 when they are equal, 1 when they are not. Two runs never have the same name and
seldom the same mesh, so what else differs is told and does not count.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from shoal.checkpoint.find import Found
from shoal.cli.checkpoint.shared import passed_over, place, progress
from shoal.errors import DIFFERENT, DONE

_MOST_NAMES = 10  # of tensors that one has and the other has not: often a whole optimizer


def run(args: argparse.Namespace) -> int:
    from shoal.checkpoint.compare import compare  # torch, which `ls` and `verify` do without

    a, b = _one(args, args.a), _one(args, args.b)
    with progress("compared", min(a.bytes, b.bytes), args.json) as on_bytes:
        found = compare(a, b, "model." if args.weights else "", on_bytes)
    code = DONE if found.same else DIFFERENT
    if args.json:
        print(json.dumps({"a": a.where, "b": b.where, "same": found.same, **asdict(found)}, indent=2))
        return code
    print(f"a: {a.where}\nb: {b.where}")
    for side, names in (("a", found.only_a), ("b", found.only_b)):
        for name in names[:_MOST_NAMES]:
            print(f"  {name}: only in {side}")
        if len(names) > _MOST_NAMES:
            print(f"  … and {len(names) - _MOST_NAMES} more only in {side} (--json lists them)")
    for changed in found.changed:
        print(f"  {changed.name}: {_words(changed)}")
    plural = "tensor is" if found.equal == 1 else "tensors are"
    print(f"{found.equal} {plural} equal" + ("." if found.same else f", {len(found.changed)} differ."))
    for fact in found.facts:
        print(f"  {fact.key}: {_shown(fact.a)} → {_shown(fact.b)}")
    return code


def _one(args: argparse.Namespace, text: str) -> Found:
    found, _ = place(args, text).take(lambda found: None, passed_over)
    return found


def _words(changed: Any) -> str:
    if changed.kinds:
        return " → ".join(changed.kinds)
    n = changed.numbers
    words = f"{n.count:,} of {n.of:,} numbers differ, by at most {n.max_abs:.3g} (relative {n.max_rel:.3g})"
    return words + (f"; {n.not_finite:,} of them infinite or NaN" if n.not_finite else "")


def _shown(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
