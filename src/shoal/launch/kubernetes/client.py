"""The cluster through kubectl: it knows every way to log in (certificates, tokens, cloud plugins), whoever has a
cluster has it, and it is no Python package to carry. One process a call, and few calls."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.errors import SetupError, ShoalError, TransientError
from shoal.launch.kubernetes import things
from shoal.launch.kubernetes.names import Manifest
from shoal.values import BadValue

T = TypeVar("T")
PROGRAM = "kubectl"
REQUEST_S = 60
_FROM_SERVER = re.compile(r"Error from server \((\w+)\): (?:error when \w+ \"[^\"]*\": )?(.*)", re.DOTALL)
_INVALID = re.compile(r"The (\w+) \"[^\"]*\" is invalid: (.*)", re.DOTALL)
_REMARK = re.compile(r"Warning:|[EIW]\d{4} \d\d:")  # beside the error: of the server, and kubectl's own log
_AWAY = re.compile(
    r"unable to connect to the server|connection to the server .* was refused|i/o timeout|tls handshake timeout"
    r"|timed out|no route to host|connection reset|ServiceUnavailable",
    re.IGNORECASE,
)


class Refused(Exception):
    """The API server's answer: its reason (`Forbidden`, `AlreadyExists`, `Invalid`, …) and its message."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason, self.message = reason, message
        self.printed = ""  # what had been done before


@dataclass(frozen=True)
class Cluster:
    context: str | None = None  # None: the kubeconfig's current one, or the pod's own account inside a cluster

    def get(self, namespace: str, kinds: Sequence[str], selector: str = "", fields: str = "") -> list[Manifest]:
        """All objects of those kinds with those labels: one list a kind, in pages, however many there are."""
        asked = ["get", ",".join(kinds), "-n", namespace, "-o", "json", f"--request-timeout={REQUEST_S}s"]
        asked += [f"--selector={selector}"] if selector else []
        asked += [f"--field-selector={fields}"] if fields else []
        return self._understood(things.listed, self.call(*asked))

    def find(self, namespace: str, kind: str, name: str) -> Manifest | None:
        answer = self.call("get", kind, name, "-n", namespace, "-o", "json", "--ignore-not-found")
        return things.thing(self._understood(things.answer, answer)) if answer.strip() else None

    def create(self, manifest: Manifest) -> Manifest:
        """As the cluster has it then."""
        return things.thing(
            self._understood(things.answer, self.call("create", "-f", "-", "-o", "json", stdin=json.dumps(manifest)))
        )

    def create_all(self, namespace: str, manifests: Sequence[Manifest]) -> list[str]:
        """All or none of them; their names, as `secret/demo`."""
        together = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        try:
            return self.call("create", "-f", "-", "-o", "name", stdin=json.dumps(together)).split()
        except Refused as e:
            self.delete(namespace, e.printed.split())
            raise

    def adopt(self, namespace: str, manifests: Sequence[Manifest], owners: list[Manifest]) -> None:
        """Gives them an owner. Applied by the server, so that nobody needs the right to read Secrets for it."""
        items = [
            {
                "apiVersion": each["apiVersion"],
                "kind": each["kind"],
                "metadata": {"name": each["metadata"]["name"], "namespace": namespace, "ownerReferences": owners},
            }
            for each in manifests
        ]
        together = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        self.call("apply", "--server-side", "--field-manager=shoal", "-f", "-", stdin=together)

    def delete(self, namespace: str, things: Sequence[str], *how: str) -> None:
        if things:
            self.call("delete", *things, "-n", namespace, "--ignore-not-found", "--wait=false", *how)

    def call(self, *arguments: str, stdin: str | None = None) -> str:
        """What it prints. The server's refusals are `Refused`, all else that is wrong a sentence."""
        try:
            done = subprocess.run(
                self.command(*arguments),
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=5 * REQUEST_S,
            )
        except FileNotFoundError:
            raise _no_program() from None
        except subprocess.TimeoutExpired:
            raise self._away("no answer in minutes") from None
        if done.returncode == 0:
            return done.stdout
        error = self._error(done.stderr)
        if isinstance(error, Refused):
            error.printed = done.stdout
        raise error

    def _understood(self, read: Callable[[str], T], printed: str) -> T:
        try:
            return read(printed)
        except BadValue as e:
            raise SetupError(
                f"what kubectl printed for {self.spoken} is no answer ({e}); is another program called so?"
            ) from None

    def command(self, *arguments: str) -> list[str]:
        return [PROGRAM, *([f"--context={self.context}"] if self.context else []), *arguments]

    @property
    def spoken(self) -> str:
        return f"the cluster of context '{self.context}'" if self.context else "the cluster"

    def _away(self, how: str) -> ShoalError:
        return TransientError(f"{self.spoken} does not answer ({how}); look at the network and its address, try again.")

    def _error(self, said: str) -> Exception:
        said = "\n".join(line for line in said.splitlines() if not _REMARK.match(line)).strip()
        if found := _FROM_SERVER.search(said):
            return Refused(found[1], " ".join(found[2].split()))
        if found := _INVALID.search(said):
            return Refused("Invalid", " ".join(found[2].split()))
        if "doesn't have a resource type" in said or "no matches for kind" in said:
            return Refused("NoSuchKind", said)
        last = said.splitlines()[-1].removeprefix("error: ") if said else "it printed nothing"
        if self.context is None and "localhost:8080" in said:  # where kubectl looks when it knows no place
            return SetupError("kubectl knows no cluster; log in to one, or set KUBECONFIG.")
        if _AWAY.search(said):
            return self._away(last)
        if "Unauthorized" in said or "credentials" in said:
            return SetupError(f"{self.spoken} does not let you in ({last}); log in to it again.")
        return SetupError(f"kubectl failed for {self.spoken} ({last}); mend that (`kubectl config get-contexts`).")


def current_context() -> str | None:
    """By name, so that the job is found again when somebody has switched to another."""
    try:
        asked = subprocess.run(
            [PROGRAM, "config", "current-context"], capture_output=True, text=True, errors="replace", timeout=REQUEST_S
        )
    except FileNotFoundError:
        raise _no_program() from None
    return asked.stdout.strip() or None


def _no_program() -> SetupError:
    return SetupError(
        "launch.on: kubernetes needs the program kubectl, which is not on the PATH; install it "
        "(https://kubernetes.io/docs/tasks/tools) and log in to your cluster."
    )


def condition(thing: Any, kind: str) -> Manifest | None:
    """That condition of an object, if it is true."""
    for each in thing.get("status", {}).get("conditions") or ():
        if each.get("type") == kind and each.get("status") == "True":
            found: Manifest = each
            return found
    return None
