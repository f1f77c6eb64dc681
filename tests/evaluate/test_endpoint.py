"""An endpoint is asked as lm-eval asks it, and what it says is not believed: a real server on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.errors import DataError, UsageError
from shoal.evaluate.endpoint import Endpoint, checked
from shoal.evaluate.model import Local
from shoal.evaluate.questions import Question
from shoal.evaluate.tokens import Encoder
from shoal.generate.opened import Wanted, of_folder
from tests.evaluate import tiny


class Server(ThreadingHTTPServer):
    """Answers with the engine's own scores, changed as the test wants."""

    def __init__(self, local: Local) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.local = local
        self.spoil: Any = lambda said: said
        self.lock = threading.Lock()
        self.seen: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(asked)
            said = self.server.spoil({"choices": [self._one(k, ids, asked) for k, ids in enumerate(asked["prompt"])]})
        data = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(200 if asked["model"] == "tiny" else 404)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _one(self, index: int, ids: list[int], asked: dict[str, Any]) -> dict[str, Any]:
        if not asked.get("echo"):
            return {"index": index, "text": " a\n\nwhale"}
        engine = self.server.local._engine
        (found,) = engine.score([(ids[:1], ids[1:])])
        each = [None, *found.logprobs]
        tops = [None, *({"best": score + (0.0 if found.greedy else 0.5)} for score in found.logprobs)]
        return {
            "index": index,
            "text": "",
            "logprobs": {"token_logprobs": [*each, -1.0], "top_logprobs": [*tops, {"x": -1.0}]},
        }

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("endpoint")
    tiny.write_model(made / "plain", False)
    tiny.write_tasks(made / "tasks")
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server(Local(of_folder(folder / "plain", Wanted("cpu", special=True)))) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def asked(server: Server) -> Iterator[Endpoint]:
    local = server.local
    yield Endpoint(server.url, "tiny", Encoder(local.opened.tokenizer, tiny.CONTEXT, False))
    server.spoil = lambda said: said


QUESTION = Question(0, (("the old whale", " hunts the ship"), ("the old whale", " sleeps")), (0,))


def test_its_scores_are_those_of_the_weights(server: Server, asked: Endpoint) -> None:
    found, known = asked.judged([QUESTION]), server.local.judged([QUESTION])
    assert [score for score, _ in found[0]] == pytest.approx([score for score, _ in known[0]], abs=1e-4)
    long = Question(1, (("", "the sea and the wind " * 40),), ())
    assert asked.rolled([long])[0][0] == pytest.approx(server.local.rolled([long])[0][0], rel=1e-6)


@pytest.mark.parametrize(
    "spoiled",
    [
        {},
        {"choices": []},
        {"choices": [{"index": 0}, {"index": 0}]},
        {"choices": [{"index": 5}, {"index": 1}]},
        b"<html>",
        b'{"choices": [NaN, 1]}',
    ],
)
def test_an_answer_that_makes_no_sense_is_refused_by_the_name_of_the_endpoint(
    server: Server, asked: Endpoint, spoiled: Any
) -> None:
    server.spoil = lambda said: spoiled
    with pytest.raises(DataError, match=r"127\.0\.0\.1"):
        asked.judged([QUESTION])


@pytest.mark.parametrize(
    ("key", "value"), [("token_logprobs", [0.5] * 40), ("token_logprobs", [-1.0]), ("top_logprobs", None)]
)
def test_scores_that_are_none_are_refused(server: Server, asked: Endpoint, key: str, value: Any) -> None:
    def spoil(said: Any) -> Any:
        said["choices"][0]["logprobs"][key] = value
        return said

    server.spoil = spoil
    with pytest.raises(DataError, match="gives no answer that can be used"):
        asked.judged([QUESTION])


def test_the_verb_asks_an_endpoint(
    server: Server, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = [
        "--model",
        "tiny",
        "--tokenizer",
        str(folder / "plain"),
        "--context",
        str(tiny.CONTEXT),
        "--out",
        str(tmp_path),
    ]
    assert (
        main(["eval", server.url, "--tasks", str(folder / "tasks" / "choice.yaml"), "--limit", "5", "--json", *at]) == 0
    )
    said = json.loads(capsys.readouterr().out)["figures"]
    assert {one["measure"] for one in said} == {"acc", "acc_norm", "acc_bytes"}
    assert all(one["n"] == 5 and one["weights"].startswith("tiny at 127.0.0.1") for one in said)
    write = str(folder / "tasks" / "write.yaml")
    assert main(["eval", server.url, "--tasks", write, "--limit", "2", "--model", "tiny", "--out", str(tmp_path)]) == 0
    assert main(["eval", server.url, "--tasks", str(folder / "tasks" / "choice.yaml"), "--model", "tiny"]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert main(["eval", server.url, "--tasks", write, "--model", "another", "--out", str(tmp_path)]) == 78
    assert "404" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:notaport", "http://host/?a=b"])
def test_what_is_no_address_is_said(url: str) -> None:
    with pytest.raises(UsageError, match="no address"):
        checked(url)
