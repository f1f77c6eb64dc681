"""What is wrong with a request before a Ray cluster hears of it, and what Ray has no use for."""

from __future__ import annotations

from shoal.errors import SpecError
from shoal.launch.request import Request

KUBERAY = "kuberay"


def check(request: Request) -> None:
    launch = request.launch
    if launch.ray.address != KUBERAY:
        for name, reference in launch.secrets.items():
            if reference.startswith("kubernetes:"):
                raise SpecError(
                    f"launch.secrets.{name} is {reference}, which only Kubernetes can look up; for a Ray cluster name "
                    "`env:NAME` or `file:/path`."
                )
    if request.time_limit_s is not None and request.time_limit_s <= request.warning_s:
        raise SpecError(
            f"launch.time_limit {launch.time_limit} leaves no time to train: {request.warning_s:g} s of it are for "
            "saving (guard.grace_s and 30 s more); make it longer."
        )


def unused(request: Request) -> list[str]:
    """Keys that say something to other schedulers and nothing to a Ray cluster, which is there already."""
    launch = request.launch
    given = {"queue": launch.queue, "priority": launch.priority, "image": launch.image, "volumes": launch.volumes}
    return [f"launch.{name}" for name, value in given.items() if value]
