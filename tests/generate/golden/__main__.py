"""`python -m tests.generate.golden [NAME…]`: asks transformers."""

from __future__ import annotations

import sys

from tests.generate.golden import kept, write
from tests.model.families import CONFIGS

if __name__ == "__main__":
    for name in sys.argv[1:] or CONFIGS:
        file = write(name)
        print(f"{name}: {file.stat().st_size:,} bytes, {kept(name).near.sum()} ties", flush=True)
