"""Looks into Parquet files and Hugging Face datasets in a child process: how they can be cut into units.

A child, `python -m shoal.data.prepare.table_look`, because a file can be made so that pyarrow ends the process that
opens it, or takes all memory. It answers for each input in turn, so that the one which killed it is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from shoal.data.broken import AGAIN
from shoal.data.prepare.bad_input import Problems
from shoal.data.prepare.child_errors import from_error, to_error
from shoal.data.prepare.inputs import Input
from shoal.data.prepare.memory_limit import LEAN, hold_to, process_bytes
from shoal.data.prepare.units import Reading
from shoal.errors import TransientError
from shoal.held_signals import held_back

Cuts = list[tuple[int, int, int]]
CRASHED = "crashes its reader"
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


def look_at_tables(inputs: Sequence[Input], reading: Reading, unit_bytes: int, problems: Problems) -> list[Cuts]:
    """(start, stop, size_bytes) of the pieces of each input (shoal.data.prepare.readers_tables.table_pieces)."""
    found: list[Cuts] = []
    while len(found) < len(inputs):
        rest = inputs[len(found) :]
        asked = {
            "inputs": [asdict(one) for one in rest],
            "reading": asdict(reading),
            "unit_bytes": unit_bytes,
            "skip": problems.skip,
        }
        code, answers = _in_a_child(asked)
        for answer in answers:
            if "error" in answer:
                raise to_error(answer)
            problems.add(answer["skipped"])
            found.append([(lo, hi, size) for lo, hi, size in answer["pieces"]])
        if len(answers) < len(rest):
            path = inputs[len(found)].path
            problems.found(CRASHED, partial(str, path), *crash(code, path))
            found.append([])
    return found


def crash(code: int, path: str) -> tuple[str, str]:
    """What a file did to the process that read it, and what to do; or an error where it was not the file."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    if code < 0 and signal.Signals(-code) in _CRASHES:
        name = signal.Signals(-code).name
        # A library that gets no more memory (shoal.data.prepare.memory_limit) ends in an abort.
        memory = ", or takes more memory than a process may have" if code == -signal.SIGABRT else ""
        return f"makes the process that reads it crash ({name}): it is damaged, or made to do that{memory}", AGAIN
    likely = " (often that is the system running out of memory: use fewer --workers)" if code == -signal.SIGKILL else ""
    raise TransientError(f"a worker {how} while it read {path}{likely}; run the same command again to go on.")


def _in_a_child(asked: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "shoal.data.prepare.table_look"]
    with contextlib.ExitStack() as ending:
        with held_back(signal.SIGINT):  # Ctrl-C reaches the whole group; the parent ends this process
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | LEAN)
            ending.callback(child.wait)
            ending.callback(child.kill)
        answers, _ = child.communicate(json.dumps(asked).encode())
    return child.returncode, [json.loads(line) for line in answers.splitlines() if line.endswith(b"}")]


def main() -> None:
    """The child: one line for each input."""
    # Whatever a library prints must not get between the messages.
    messages = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from shoal.data.prepare.readers_tables import table_pieces

    asked = json.load(sys.stdin)
    reading = Reading(**asked["reading"])
    hold_to(process_bytes(reading))
    for one in asked["inputs"]:
        problems = Problems(asked["skip"])
        try:
            pieces = list(table_pieces(Input(**one), reading, asked["unit_bytes"], problems))
            answer: dict[str, Any] = {"pieces": pieces, "skipped": problems.to_json()}
        except Exception as e:
            answer = from_error(e)
        messages.write(json.dumps(answer) + "\n")
        messages.flush()


if __name__ == "__main__":
    main()
