"""An OpenAI-shaped endpoint as a model: `/v1/completions` with `echo` and `logprobs`, as lm-eval's local-completions.

Prompts are sent as tokens of the model's own tokenizer, so that what is asked is what would be asked of the weights.
All that comes back is a stranger's: sizes, types, counts and numbers are checked.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from shoal.errors import DataError, SetupError, TransientError, UsageError
from shoal.evaluate.model import Score, cut
from shoal.evaluate.questions import Question
from shoal.evaluate.task import Until
from shoal.evaluate.tokens import Encoder, Pair
from shoal.values import BadValue, field, inside, items, read_object, real, text, whole

MOST_ANSWER = 64 << 20
TIMEOUT_S = 600.0
TRIES = 4
USUAL_CONTEXT = 2048  # lm-eval's, where nobody says another
_AGAIN = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Endpoint:
    url: str
    model: str
    encoder: Encoder | None = None
    """None: it can be asked to write only."""
    key: str | None = None
    """Of the server; never printed or kept."""
    at_once: int = 8

    @property
    def name(self) -> str:
        return f"{self.model} at {urlsplit(self.url).netloc.rpartition('@')[2]}"

    @property
    def digest(self) -> str:
        """Who answers there may change its weights without a word: the name is all there is."""
        return hashlib.sha256(f"{self.url} {self.model}".encode()).hexdigest()

    def judged(self, questions: Sequence[Question]) -> list[list[Score]]:
        pairs = [[self._encoder.pair(context, more) for context, more in one.asks] for one in questions]
        found = self._scored([pair for each in pairs for pair in each])
        return [[next(found) for _ in each] for each in pairs]

    def rolled(self, questions: Sequence[Question]) -> list[Score]:
        windows = [self._encoder.windows(one.asks[0][1]) for one in questions]
        found = self._scored([pair for each in windows for pair in each])
        parts = [[next(found) for _ in each] for each in windows]
        return [(math.fsum(score for score, _ in each), all(greedy for _, greedy in each)) for each in parts]

    def written(self, questions: Sequence[Question], until: Until) -> list[str]:
        answers = []
        for at in range(0, len(questions), self.at_once):
            part = questions[at : at + self.at_once]
            prompts: list[Any] = [one.asks[0][0] for one in part]
            if self.encoder is not None:
                prompts = [self.encoder.prompt(one, until.max_tokens) for one in prompts]
            asked = {"prompt": prompts, "max_tokens": until.max_tokens, "temperature": until.temperature}
            asked |= {"stop": list(until.stops[:4]), "seed": 1234, "top_p": until.top_p}
            for choice in self._choices(asked, len(part)):
                with self._hostile():
                    answers.append(cut(field(choice, "text", lambda said: text(said, MOST_ANSWER)), until.stops))
        return answers

    @property
    def _encoder(self) -> Encoder:
        if self.encoder is None:
            raise UsageError("log-likelihoods of an endpoint are asked for in tokens, and it was given no tokenizer.")
        return self.encoder

    def _scored(self, pairs: Sequence[Pair]) -> Iterator[Score]:
        for at in range(0, len(pairs), self.at_once):
            part = pairs[at : at + self.at_once]
            # A server that refuses to write nothing writes one token, of which nothing is read.
            asked = {"prompt": [[*context, *more] for context, more in part], "max_tokens": 1, "temperature": 0}
            choices = self._choices(asked | {"echo": True, "logprobs": 1, "seed": 1234}, len(part))
            for (context, more), choice in zip(part, choices, strict=True):
                with self._hostile():
                    yield score_of(choice, len(context), len(more))

    def _choices(self, asked: dict[str, Any], count: int) -> list[Any]:
        said = self._asked({"model": self.model, **asked})
        with self._hostile():
            found = field(said, "choices", lambda rows: items(rows, count))
            places = [field(one, "index", lambda n: whole(n, count - 1), k) for k, one in enumerate(found)]
            if sorted(places) != list(range(count)):
                raise BadValue(f"{count} prompts were sent, and answers to {len(set(places))} came back", "choices")
            return [found[places.index(k)] for k in range(count)]

    def _hostile(self) -> _Hostile:
        return _Hostile(self.url)

    def _asked(self, body: dict[str, Any]) -> dict[str, Any]:
        data, wait_s = json.dumps(body).encode(), 1.0
        for tries in range(TRIES):
            try:
                status, answer = self._post(data)
            except (OSError, http.client.HTTPException) as e:
                status, answer = 0, str(e).encode()
            if status == 200:
                with self._hostile():
                    return read_object(answer, most_bytes=MOST_ANSWER)
            if status not in (0, *_AGAIN):
                why = answer.decode(errors="replace")[:200]
                raise SetupError(
                    f"{self.url} refuses: {status} {why!r}; correct the address, the model's name or the key."
                )
            if tries < TRIES - 1:
                time.sleep(wait_s)
                wait_s *= 2
        why = f"status {status}" if status else answer.decode(errors="replace")[:200]
        raise TransientError(f"{self.url} does not answer ({why}); start this again, and it goes on where it was.")

    def _post(self, data: bytes) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            connection.request("POST", f"{parts.path.rstrip('/')}/v1/completions", data, headers)
            reply = connection.getresponse()
            answer = reply.read(MOST_ANSWER + 1)
        finally:
            connection.close()
        if len(answer) > MOST_ANSWER:
            raise DataError(f"{self.url} answers with more than {MOST_ANSWER >> 20} MiB; it is no such endpoint.")
        return reply.status, answer


class _Hostile:
    """What is refused here is refused in one sentence that names the endpoint."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BadValue):
            raise DataError(
                f"{self._url} gives no answer that can be used: {error}; it must take `echo` with `logprobs`."
            ) from None


def score_of(choice: Any, context: int, more: int) -> Score:
    """Of an echoed prompt, its last `more` tokens. What was written after it is left out."""
    with inside("logprobs"):
        told = field(choice, "logprobs", lambda said: said)
        total = context + more
        each = field(told, "token_logprobs", lambda rows: items(rows, total + 16))
        tops = field(told, "top_logprobs", lambda rows: items(rows, total + 16))
        if not total <= len(each) or len(tops) != len(each):
            raise BadValue(f"{total} tokens were sent, and {len(each)} came back")
        found = [real(one, 0.0 + 1e-6, -1e6) for one in each[context:total]]
        likeliest = []
        for said, top in zip(found, tops[context:total], strict=True):
            if not isinstance(top, dict) or not 0 < len(top) <= 100:
                raise BadValue("no object of the likeliest tokens", "top_logprobs")
            likeliest.append(said >= max(real(value, 1e-6, -1e6) for value in top.values()))
        return math.fsum(found), all(likeliest)


def checked(url: str) -> str:
    """An address that can be asked: http or https, without what belongs to a request."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        known = False
    if not known or parts.query or parts.fragment:
        raise UsageError(f"{url} is no address of an endpoint; give it as http://HOST:PORT.")
    return url.rstrip("/").removesuffix("/v1/completions").removesuffix("/v1")
