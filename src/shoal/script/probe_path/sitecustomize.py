"""Python imports this when it starts, where its folder stands first in PYTHONPATH: so Shoal's probe gets into a script
without an edit of it. Only a process that the supervisor has started itself is a rank: what a rank starts (loaders,
pools, pip) is left alone. A `sitecustomize` of the user or the distribution, which this one hides, is run as well.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def begin() -> None:
    if os.environ.get("SHOAL_PROBE_OF") != str(os.getppid()):
        return
    try:
        from shoal.script.probe import begin_here

        begin_here()
    except Exception as e:
        print(f"shoal: the script runs without the probe ({type(e).__name__}: {e})", file=sys.stderr)


def chain() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != HERE]
begin()
chain()
