"""As much of W&B's server as its client talks to: the real one cannot run on a developer's machine.

Keeps the history lines that arrive, and answers a resume with them, which is what our exactly-once rests on.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.patience import limit


class FakeWandb:
    def __init__(self, port: int = 0) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self._server: ThreadingHTTPServer | None = None
        self.port = port

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def history(self, key: str) -> list[dict[str, Any]]:
        return [json.loads(line) for _, line in sorted(self.runs[key]["history"].items())]

    @contextmanager
    def up(self) -> Iterator[None]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                answer = json.dumps(fake.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_PUT = do_POST

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = int(self._server.server_address[1])
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join(limit(5))

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path.startswith("/graphql"):
            asked = json.loads(body)
            return {"data": self._graphql(asked["query"], asked.get("variables") or {})}
        if path.endswith("/file_stream"):
            self._stream(path.split("/")[-2], json.loads(body))
        return {"exitcode": None, "limits": {}}

    def _graphql(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        if "RunResumeStatus" in query:
            project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": "me"}}
            return {"model": {**project, "bucket": self._resume(given["name"])}}
        if "upsertBucket" in query:
            name = given["name"]
            run = self.runs.setdefault(name, {"history": {}, "summary": "{}", "sessions": 0})
            run["config"] = given.get("config") or "{}"
            for key, called in (("group", "groupName"), ("tags", "tags")):
                run[key] = given.get(called) or run.get(key)
            project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": "me"}}
            bucket = {"id": name, "name": name, "displayName": given.get("displayName"), "config": run["config"]}
            return {"upsertBucket": {"bucket": {**bucket, "historyLineCount": 0, "project": project}, "inserted": True}}
        if "createRunFiles" in query:
            files = [{"name": f, "uploadUrl": f"{self.address}/upload/{f}"} for f in given["files"]]
            return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
        if "viewer" in query:
            return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        return {}

    def _resume(self, name: str) -> dict[str, Any] | None:
        run = self.runs.get(name)
        if run is None:
            return None
        lines = [line for _, line in sorted(run["history"].items())]
        return {
            "id": name,
            "name": name,
            "displayName": name,
            "summaryMetrics": run["summary"],
            "logLineCount": 0,
            "historyLineCount": len(lines),
            "eventsLineCount": 0,
            "historyTail": json.dumps(lines[-1:]),
            "eventsTail": "[]",
            "config": run["config"],
            "tags": [],
            "notes": "",
            "wandbConfig": json.dumps({"t": {}}),
        }

    def _stream(self, name: str, sent: dict[str, Any]) -> None:
        files = sent.get("files") or {}
        history = files.get("wandb-history.jsonl")
        if history:
            for i, line in enumerate(history["content"]):
                self.runs[name]["history"][history["offset"] + i] = line
        if "wandb-summary.json" in files:
            self.runs[name]["summary"] = files["wandb-summary.json"]["content"][-1]
        if sent.get("complete"):
            self.runs[name]["exit_code"] = sent.get("exitcode")
