"""Ray: a job's driver holds one actor a node, and each keeps an agent there. `run` is for a program that uses Ray.

Nothing here imports ray before it is used: rendering and refusing need none.
"""

from shoal.launch.ray.from_python import run

__all__ = ["run"]
