"""Not Horovod: Shoal's stand-in for it, over torch.distributed. `shoal run` puts it into a script's path."""

import sys
from typing import NoReturn

from shoal.script.horovod.refused import Finder, missing

__version__ = "0.28.1"  # whose functions it has
sys.meta_path.append(Finder())


def __getattr__(name: str) -> NoReturn:
    missing("horovod", name)
