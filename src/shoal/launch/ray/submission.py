"""A request as what Ray's job API is sent. Pure: nothing here asks a cluster."""

from __future__ import annotations

import hashlib
import io
import math
import shlex
import zipfile
from typing import Any

from shoal.launch.ray.order import setup
from shoal.launch.request import Request

TAR = "bundle.tar.gz"
STOP_MARGIN_S = 30  # Ray kills the driver so long after the driver would have killed the agents


def job_id(request: Request) -> str:
    """The run's name and eight digits of this request: a run is launched many times."""
    return f"{request.label}-{hashlib.sha256(request.token.encode()).hexdigest()[:8]}"


def package_name(request: Request) -> str:
    return f"_ray_pkg_shoal_{request.bundle.sha256[:32]}.zip"


def package(request: Request) -> bytes:
    """The bundle as Ray unpacks it: the same bytes for the same content."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as whole:
        whole.writestr(zipfile.ZipInfo(TAR), request.bundle.tar())
    return out.getvalue()


def submission(request: Request) -> dict[str, Any]:
    """The body of POST /api/jobs/."""
    wait_s = math.ceil(request.warning_s) + STOP_MARGIN_S
    return {
        "submission_id": job_id(request),
        "entrypoint": entrypoint(request, TAR, job_id(request)),
        "runtime_env": {
            "working_dir": f"gcs://{package_name(request)}",
            # Ray's own patience with a job that was told to stop is 3 s.
            "env_vars": {**request.launch.env, "RAY_JOB_STOP_WAIT_TIME_S": str(wait_s)},
        },
        "metadata": {"job_name": request.name, "shoal_bundle": request.bundle.sha256},
    }


def entrypoint(request: Request, bundle: str, job: str) -> str:
    driver = script(request, bundle, job)
    return f"exec bash -c {shlex.quote(driver)}" if request.launch.setup else driver


def script(request: Request, bundle: str, job: str) -> str:
    """The shell becomes the driver: a signal to it is one to the driver."""
    command = [
        request.python, "-m", "shoal.launch.ray.driver", bundle, "--job", job,
        "--workspace", request.there, "--python", request.python,
    ]  # fmt: skip
    return "\n".join([*setup(request), f"exec {shlex.join(command)}"])
