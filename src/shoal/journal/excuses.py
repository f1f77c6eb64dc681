"""What may take long, as the Python frames of a process show it: compiling, in whichever thread, and downloading."""

from __future__ import annotations

from collections.abc import Iterable

Frame = tuple[str, int, str]  # file, line, function

# File → the functions that say so; none named: any. An autotuned kernel is also launched from the file that tunes it.
_COMPILERS: dict[str, tuple[str, ...]] = {
    "torch/_dynamo/convert_frame.py": (),
    "torch/_inductor/compile_fx.py": (),
    "torch/_inductor/runtime/triton_heuristics.py": ("precompile", "benchmark_all_configs"),
    "triton/compiler/compiler.py": ("compile",),
    "triton/runtime/autotuner.py": ("_bench",),
    "torch/utils/cpp_extension.py": (),
}
_DOWNLOADS = "shoal/data/remote.py"


def excuse(phase: str, main: list[Frame], reader: list[Frame], others: Iterable[list[Frame]]) -> str | None:
    """`reader` is the thread that reads the data, which excuses nobody who does not wait for data; `others` are the
    threads besides: the backward pass is compiled in one of autograd's."""
    if any(map(_compiles, (main, *others))):
        return "compile"
    downloads = any(file.endswith(_DOWNLOADS) for file, _, _ in (*main, *(reader if phase == "data" else ())))
    return "download" if downloads else None


def _compiles(frames: list[Frame]) -> bool:
    for file, _, name in frames:
        for ending, functions in _COMPILERS.items():
            if file.endswith(ending) and (not functions or name in functions):
                return True
    return False
