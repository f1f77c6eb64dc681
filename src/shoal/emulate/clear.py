"""`python -m shoal.emulate.clear PREFIX`: the forwarder's shell calls it when whoever made a network is gone."""

from __future__ import annotations

import sys

from shoal.emulate.spaces import beginning, remove

if __name__ == "__main__":
    remove(beginning(sys.argv[1]))
