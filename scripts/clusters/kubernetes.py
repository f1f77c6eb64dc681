"""A real Kubernetes control plane: `python -m scripts.clusters.kubernetes` builds it and prints where its programs are.

The project publishes them as container images only, so they are built from their Go modules with a Go toolchain that
comes as a Python package. go.mod and go.sum under `go` pin all of it by hash. What is built stays in the cache
(`cache.py`); Go's own caches, gigabytes, live until the last part is built, so that a build that was cut off goes on
where it was. KUBEBUILDER_ASSETS, if it names a folder with all four programs, is used instead.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.clusters import cache

MODULES = Path(__file__).with_name("go")
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd")


@dataclass(frozen=True)
class Part:
    """Programs that are built in one go and kept in one folder."""

    name: str
    module: str
    packages: tuple[str, ...]
    # What a cluster needs besides the program: CustomResourceDefinitions and webhooks, as folders of the module.
    manifests: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        return _pinned(self.module)

    @property
    def folder(self) -> Path:
        return cache.root() / self.name / self.version


def _pinned(module: str) -> str:
    """The version that go.mod requires, or that it puts in its place."""
    text = (MODULES / "go.mod").read_text()
    found = re.findall(rf"^\s*(?:{re.escape(module)} => )?{re.escape(module)} v(\S+)", text, re.MULTILINE)
    assert found, f"{module} is not in go.mod"
    return str(found[-1])


_ADDED = ("config/components/crd/bases", "config/components/webhook")
_COMMANDS = (*(f"k8s.io/kubernetes/cmd/{program}" for program in PROGRAMS[:3]), "go.etcd.io/etcd/server/v3")
# All of one go.mod, so that what they have in common is compiled once. Kueue 0.19 does not compile with the libraries
# of Kubernetes 1.37 (2026-11), so all have those of 1.36.
CONTROL_PLANE = Part("kubernetes", "k8s.io/kubernetes", _COMMANDS)
JOBSET = Part("jobset", "sigs.k8s.io/jobset", ("sigs.k8s.io/jobset",), _ADDED)
KUEUE = Part("kueue", "sigs.k8s.io/kueue", ("sigs.k8s.io/kueue/cmd/kueue",), _ADDED)


def programs() -> Path:
    """The folder of the control plane's four programs; FileNotFoundError where they have not been built."""
    return _assets() or built(CONTROL_PLANE)


def _assets() -> Path | None:
    folder = Path(os.environ.get("KUBEBUILDER_ASSETS") or "/nonexistent")
    return folder if all((folder / program).is_file() for program in PROGRAMS) else None


def built(part: Part) -> Path:
    if not part.folder.is_dir():
        raise FileNotFoundError(f"{part.name} {part.version} is not built: python -m scripts.clusters.kubernetes")
    return part.folder


def build(parts: list[Part]) -> None:
    """All that is missing, one after the other. They share most of what they are made of."""
    work = cache.root() / "go"
    with cache.locked(work):
        missing = [part for part in parts if not part.folder.is_dir()]
        if missing:
            with cache.making(work / "toolchain") as new:
                if new is not None:
                    cache.install("go", new)
        for part in missing:
            with cache.making(part.folder) as new:
                assert new is not None
                _build(part, new, work)
        _remove(work)


def _build(part: Part, into: Path, work: Path) -> None:
    begun = time.monotonic()
    print(f"clusters: building {part.name} {part.version} (minutes, once)…", file=sys.stderr, flush=True)
    go = work / "toolchain" / "go"
    environment = os.environ | {
        "GOROOT": str(go),
        "GOPATH": str(work / "path"),
        "GOMODCACHE": str(work / "modules"),
        "GOCACHE": str(work / "objects"),
        "GOTOOLCHAIN": "local",
        "GOFLAGS": "-buildvcs=false",
        "GOWORK": "off",
        "GOTELEMETRY": "off",
        "CGO_ENABLED": "0",
    }
    command = [str(go / "bin" / "go"), "build", "-trimpath", "-gcflags=all=-dwarf=false", "-ldflags", _stamp(part)]
    command = ["nice", "-n", "10", *command, "-o", f"{into}/", *part.packages]
    subprocess.run(command, cwd=MODULES, env=environment, check=True)
    if part is CONTROL_PLANE:
        os.replace(into / "server", into / "etcd")  # Go names it after its package
    for folder in part.manifests:
        for manifest in (work / "modules" / f"{part.module}@v{part.version}" / folder).glob("*.yaml"):
            if "kustom" not in manifest.name:
                name = f"{Path(folder).name}-{manifest.name}"
                (into / name).write_bytes(manifest.read_bytes())
    print(f"clusters: {part.name} took {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


def _stamp(part: Part) -> str:
    """Without a version the API server says v0.0.0-master, which clients refuse; debugging symbols double its size."""
    _, minor, patch = _pinned("k8s.io/client-go").split(".")
    values = {"gitVersion": f"v1.{minor}.{patch}", "gitMajor": "1", "gitMinor": minor}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return " ".join(["-s", "-w", *(f"-X {p}.{key}={value}" for p in packages for key, value in values.items())])


def _remove(tree: Path) -> None:
    """Go makes the folders of modules read-only."""
    for folder, _, _ in os.walk(tree):
        os.chmod(folder, stat.S_IRWXU)
    shutil.rmtree(tree, ignore_errors=True)


def main() -> None:
    parts = [*([] if _assets() else [CONTROL_PLANE]), JOBSET, KUEUE]
    build(parts)
    print(programs(), *(part.folder for part in (JOBSET, KUEUE)), sep="\n")


if __name__ == "__main__":
    main()
