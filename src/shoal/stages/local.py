"""All peers of a cut model on this machine, to try it out: keys, ports and processes, and one log to read."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from shoal.errors import TransientError
from shoal.net.identity import Identity


def run_here(file: Path, counts: Sequence[int], folder: Path, overrides: Sequence[str]) -> int:
    """Until all that are left have finished. A peer that is killed is not started again: that is yours to do."""
    folders = [[folder / f"stage-{s + 1}-{i + 1}" for i in range(n)] for s, n in enumerate(counts)]
    ports = iter(_free_ports(sum(counts)))
    peers = [
        [{"id": Identity.at(f / "key").id, "tcp": [f"127.0.0.1:{next(ports)}"]} for f in stage] for stage in folders
    ]
    (folder / "peers.json").write_text(json.dumps(peers, indent=1))
    command = [sys.executable, "-m", "shoal.stages", "run", str(file), "--peers", str(folder / "peers.json")]
    processes: dict[str, subprocess.Popen[bytes]] = {}
    for f in (f for stage in folders for f in stage):
        with open(f / "log", "ab") as log:
            mine = [*command, "--key", str(f / "key"), "--folder", str(f), *overrides]
            own = None if f is folders[0][0] else log  # the first one's lines are shown
            processes[f.name] = subprocess.Popen(mine, stdout=own, stderr=own)
        print(f"{f.name}: process {processes[f.name].pid}, {f / 'log'}", flush=True)
    try:
        code = _follow(processes)
        if len(folders) > 1:
            firsts = " ".join(str(stage[0]) for stage in folders)
            print(f"one run of them, to sample, export or resume: shoal checkpoint join {firsts} DIR", flush=True)
        return code
    except KeyboardInterrupt:
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        for process in processes.values():
            process.wait()
        raise
    finally:
        for process in processes.values():
            process.kill()


def _follow(processes: dict[str, subprocess.Popen[bytes]]) -> int:
    codes: dict[str, int] = {}
    while len(codes) < len(processes):
        time.sleep(0.2)
        for name, process in processes.items():
            if name not in codes and (code := process.poll()) is not None:
                codes[name] = code
                print(f"{name} {'has finished' if code == 0 else f'is gone ({code})'}", flush=True)
                if code > 0:
                    raise TransientError(f"{name} left with {code}: its log says why.")
    if 0 not in codes.values():
        raise TransientError("all peers are gone: start it again with the same folder, and it goes on.")
    return 0


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]
