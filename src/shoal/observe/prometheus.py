"""A run as Prometheus reads it: `python -m shoal.observe.prometheus runs/NAME --port 29401` answers GET /metrics.

A process of its own beside the run, with the journal as its only source: it can neither slow the run down nor end it.
Each answer reads the journal's end anew, so that it is never older than the question. Never imports torch.
"""

from __future__ import annotations

import argparse
import math
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from shoal.errors import ShoalError
from shoal.journal.journal import Record
from shoal.journal.rundir import RunDir
from shoal.journal.tail import tail
from shoal.observe.status import TAIL_BYTES, status_of
from shoal.observe.throughput import duration_s, mfu

PORT = 29401
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Gauge(NamedTuple):
    name: str
    help: str
    value: float | None  # None: not known (yet)


def gauges(run_dir: RunDir, now: float | None = None) -> list[Gauge]:
    """Everything is a gauge: a run that goes back to a checkpoint takes its steps a second time."""
    status = status_of(run_dir, now)
    newest = _newest(tail(run_dir.journal_file, TAIL_BYTES[1]))
    step, start = newest.get("step", {}), newest.get("start")
    used = mfu(step, start) if step else None
    return [
        Gauge("shoal_running", "1 while the run is alive", float(status.status == "running")),
        Gauge("shoal_step", "Steps that are taken", status.step),
        Gauge("shoal_steps_asked", "Steps that were asked for (train.steps)", status.total),
        Gauge("shoal_loss", "Loss of the newest step", status.loss),
        Gauge("shoal_eval_loss", "Loss of the newest evaluation", _number(newest.get("eval", {}), "loss")),
        Gauge("shoal_grad_norm", "Norm of the gradient in the newest step", _number(step, "grad_norm")),
        Gauge("shoal_learning_rate", "Learning rate of the newest step", _number(step, "lr")),
        Gauge("shoal_tokens_per_second", "Of the newest steps, over all processes", status.tokens_per_s),
        Gauge("shoal_mfu_ratio", "Share of the devices' peak that the newest step used, causal", used),
        Gauge("shoal_step_seconds", "Wall time of the newest step", duration_s(step) if step else None),
        Gauge("shoal_data_wait_seconds", "Wait for data in the newest step", _number(step.get("time", {}), "data_s")),
        Gauge("shoal_restarts", "Times that the workers were started again", _number(newest.get("attempt"), "attempt")),
        Gauge("shoal_checkpoint_step", "Step of the newest checkpoint", _number(newest.get("checkpoint"), "step")),
        Gauge("shoal_last_step_timestamp_seconds", "When the newest step ended", _number(step, "t")),
    ]


def text(name: str, found: list[Gauge]) -> str:
    """Prometheus' text format."""
    run = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = []
    for gauge in found:
        if gauge.value is not None:
            value = "NaN" if math.isnan(gauge.value) else repr(float(gauge.value)).replace("inf", "Inf")
            lines += [f"# HELP {gauge.name} {gauge.help}", f"# TYPE {gauge.name} gauge"]
            lines.append(f'{gauge.name}{{run="{run}"}} {value}')
    return "".join(f"{line}\n" for line in lines)


def server(run_dir: RunDir, port: int) -> ThreadingHTTPServer:
    """Listens when this returns; `serve_forever` answers."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            try:
                said = text(run_dir.name, gauges(run_dir)) if run_dir.exists() else ""  # a run that has not begun
            except (ShoalError, OSError) as e:
                self.send_error(503, explain=str(e))
                return
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(said.encode())))
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, *_: object) -> None:
            """Silence: this would be in the run's log."""

    return ThreadingHTTPServer(("", port), Answers)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.observe.prometheus", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="runs/NAME of a workspace; it may come later")
    parser.add_argument("--port", type=int, default=PORT)
    args = parser.parse_args(argv)
    try:
        server(RunDir(args.run), args.port).serve_forever()
    except OSError as e:
        print(f"shoal: no metrics on port {args.port} ({e.strerror}).", file=sys.stderr)
    return 0


def _newest(records: list[Record]) -> dict[str, Record]:
    return {str(record.get("kind")): record for record in records}


def _number(record: Record | None, key: str) -> float | None:
    value = (record or {}).get(key)
    return float(value) if isinstance(value, int | float | str) else None


if __name__ == "__main__":
    sys.exit(main())
