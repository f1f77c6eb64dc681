"""What Prometheus reads of a run is what its journal says, as text that Prometheus takes."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.journal.rundir import RunDir
from shoal.observe.prometheus import server
from tests.journal.journals import make_run
from tests.patience import limit
from tests.services import free_ports

# A line of the text format, version 0.0.4: a name, labels, a number.
_SAMPLE = re.compile(r'([a-z_]+)\{run="((?:[^"\\\n]|\\.)*)"\} (NaN|[+-]?Inf|[-+.e0-9]+)')


@contextmanager
def serving(run_dir: RunDir) -> Iterator[str]:
    (port,) = free_ports(1)
    serves = server(run_dir, port)
    threading.Thread(target=serves.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serves.shutdown()
        serves.server_close()


def scraped(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=limit(10)) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if not line.startswith("#"):
            sample = _SAMPLE.fullmatch(line)
            assert sample, line
            assert f"# TYPE {sample[1]} gauge" in lines
            found[sample[1]] = float(sample[3])
    return found


def test_a_run_is_read_as_it_goes_on(tmp_path: Path) -> None:
    with serving(RunDir.of("demo", tmp_path)) as url:
        assert scraped(url) == {}  # it has not begun
        story = make_run(tmp_path, "demo").open().start(peak_flops=1e12).steps(3)
        first = scraped(url)
        assert (first["shoal_step"], first["shoal_steps_asked"], first["shoal_restarts"]) == (3, 200, 0)
        assert first["shoal_loss"] > 0
        assert first["shoal_data_wait_seconds"] == pytest.approx(story.data_s)
        assert 0 < first["shoal_mfu_ratio"] < 1
        assert first["shoal_last_step_timestamp_seconds"] == pytest.approx(story.t, abs=1)
        story.start(at_step=2).steps(6)
        later = scraped(url)
        assert (later["shoal_step"], later["shoal_restarts"]) == (6, 1)
        story.close("done", 0, "all done")
        assert scraped(url)["shoal_running"] == 0
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/", timeout=limit(10))


def test_a_loss_that_is_no_number_and_an_odd_name_are_still_readable(tmp_path: Path) -> None:
    story = make_run(tmp_path, 'a"b').open().start()
    story.write("step", attempt=0, step=1, begin=story.t, tokens=1, loss="nan", grad_norm=float("inf"), lr=0.1, time={})
    with serving(RunDir.of('a"b', tmp_path)) as url:
        found = scraped(url)
    assert found["shoal_loss"] != found["shoal_loss"]
    assert found["shoal_grad_norm"] == float("inf")
