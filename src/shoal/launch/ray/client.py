"""A Ray cluster through its job API, and its answers in one sentence each."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shoal.errors import SetupError, ShoalError, TransientError, needs_extra
from shoal.launch.ray.mailbox import AT_ONCE, SECRETS, package

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

MOST_GROUPS = 10_000  # in one answer of Ray's state API
ENVIRONMENT = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")


class Cluster:
    """`auto`: what RAY_ADDRESS names, or the cluster of this machine; else the address of its dashboard."""

    def __init__(self, address: str) -> None:
        try:
            from ray.job_submission import JobSubmissionClient
        except ImportError:
            raise needs_extra("ray[default]", "ray", "launch.on: ray") from None
        auto = address in ("auto", "local")
        try:
            with _only_if(auto):
                self._client = JobSubmissionClient(None if auto else address)
        except Exception as e:  # ConnectionError, RuntimeError, requests' own
            raise _no_cluster(address, auto, e) from e

    @property
    def address(self) -> str:
        return str(self._client.get_address())

    def has(self, name: str) -> bool:
        """Whether it holds that package; one that it does is kept for the next minutes."""
        return bool(self._ask("GET", f"/api/packages/gcs/{name}", missing_is_fine=True))

    def put(self, name: str, data: bytes) -> None:
        self._ask("PUT", f"/api/packages/gcs/{name}", data=data)

    def put_secrets(self, job: str, secrets: Mapping[str, str]) -> None:
        # The first line is for Ray, which prints the beginning of what it failed to store.
        self.put(package(SECRETS, job), f"for the driver of {job}\n{json.dumps(dict(secrets))}".encode())

    def submit(self, body: Mapping[str, Any]) -> None:
        self._ask("POST", "/api/jobs/", json_data=dict(body))

    def jobs(self) -> dict[str, JobDetails]:
        """All that were submitted, by their submission ids, in one call."""
        with self._spoken():
            return {job.submission_id: job for job in self._client.list_jobs() if job.submission_id}

    def groups(self) -> dict[str, str]:
        """The states of all placement groups, by their names, in one call."""
        from ray.util.state import list_placement_groups

        with self._spoken():
            found = list_placement_groups(
                self.address, limit=MOST_GROUPS, raise_on_missing_output=False, filters=[("state", "!=", "REMOVED")]
            )
        return {str(group.name): str(group.state) for group in found}

    def stop(self, job: str, at_once: bool) -> None:
        if at_once:
            self.put(package(AT_ONCE, job), b"yes")
        with self._spoken():
            self._client.stop_job(job)

    def logs(self, job: str) -> str:
        with self._spoken():
            return str(self._client.get_job_logs(job))

    def follow(self, job: str) -> Iterator[str]:
        """Pieces of its log from the beginning, until it ends."""
        loop = asyncio.new_event_loop()
        pieces = self._client.tail_job_logs(job)
        try:
            with self._spoken():
                while True:
                    try:
                        yield str(loop.run_until_complete(anext(pieces)))
                    except StopAsyncIteration:
                        return
        finally:
            loop.run_until_complete(pieces.aclose())
            loop.close()

    def _ask(self, method: str, path: str, missing_is_fine: bool = False, **more: Any) -> bool:
        """With the client's own way of logging in, which may need cookies or a token."""
        with self._spoken():
            answer = self._client._do_request(method, path, **more)
        if answer.status_code == 200:
            return True
        if answer.status_code == 404 and missing_is_fine:
            return False
        raise SetupError(f"Ray at {self.address} refused {path} ({answer.status_code}: {_last_line(answer.text)}).")

    @contextmanager
    def _spoken(self) -> Iterator[None]:
        try:
            yield
        except ShoalError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as e:  # its client's, of an answer that is none
            if isinstance(e, OSError):  # requests' own, which are both
                raise SetupError(f"what answers at {self.address} is no Ray dashboard; mend launch.ray.address.") from e
            raise SetupError(f"Ray at {self.address} says what its client cannot read ({type(e).__name__}).") from e
        except RuntimeError as e:  # what the client makes of an answer that is none of 200
            raise SetupError(f"Ray at {self.address} refused: {_last_line(str(e))}.") from e
        except OSError as e:  # requests' errors are that, too
            raise TransientError(
                f"Ray at {self.address} does not answer; look whether its head runs, try again."
            ) from e


def _no_cluster(address: str, auto: bool, e: Exception) -> SetupError:
    if auto:
        return SetupError(
            "there is no Ray cluster on this machine; start one (`ray start --head`), or set launch.ray.address to "
            "http://HEAD:8265 of another."
        )
    return SetupError(
        f"no Ray cluster answers at {address} ({_last_line(str(e))}); launch.ray.address must be its dashboard, as in "
        "http://HEAD:8265."
    )


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip().rstrip(".") if lines else "no reason given"


@contextmanager
def _only_if(wanted: bool) -> Iterator[None]:
    """Ray lets its environment variables win over an address that it is given; a job is asked for where it is."""
    before = {} if wanted else {name: os.environ.pop(name) for name in ENVIRONMENT if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)
