"""Which generator reaches which place: measured, and written to read_by.json. `python -m tests.fuzz reach`."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz import sites
from tests.fuzz.reader import CASES, READERS, load
from tests.fuzz.run import case_of, one

_CASES = 80
_MOST_BYTES = 16 << 30  # of addresses; torch alone takes several


def write() -> dict[str, str]:
    """The table anew; of several generators the one with the most cases of a long run."""
    by: dict[str, list[str]] = {}
    for name, reader in READERS.items():
        for place in _reached(name, _CASES if reader.share >= 10 else _CASES // 2 if reader.share > 1 else 2):
            by.setdefault(place, []).append(name)
    places = {
        place: max(by[place], key=lambda name: (READERS[name].share, name))
        for place in sorted(sites.found())
        if place in by and place not in sites.OURS
    }
    sites.TABLE.write_text(json.dumps(places, indent=1) + "\n")
    return places


def _reached(name: str, cases: int) -> set[str]:
    """In a child: a reader may patch what the next one needs."""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        with open(out, "rb") as told:
            text = told.read()
        os.waitpid(pid, 0)
        if not text:
            raise RuntimeError(f"the generator of {name} failed; `python -m tests.fuzz {name} --show` tells why")
        return set(json.loads(text))
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
        hit: set[str] = set()
        known: dict[Any, str] = {}

        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "call":
                code = frame.f_code
                if code not in known:
                    known[code] = _place(code.co_filename, code.co_qualname)
                hit.add(known[code])

        with tempfile.TemporaryDirectory(prefix="shoal-fuzz-") as folder:
            target = READERS[name].make(Path(folder))
            sys.setprofile(note)
            for seed in range(cases):
                one(target, case_of(name, target, seed))
            for file in sorted((CASES / name).glob("*")):
                one(target, load(file))
            sys.setprofile(None)
        with open(into, "wb") as tell:
            tell.write(json.dumps(sorted(hit)).encode())
        code = 0
    finally:
        os._exit(code)


def _place(file: str, name: str) -> str:
    if not file.startswith(str(sites.SOURCE)):
        return ""
    module = ".".join(Path(file).relative_to(sites.SOURCE).with_suffix("").parts)
    parts = [part for part in name.split(".") if not part.startswith("<")]  # <locals>, <listcomp>
    return f"{module}:{'.'.join(parts)}"
