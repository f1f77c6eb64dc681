"""Bytes that are filled in before anybody sees them.

Memory that the kernel has to hand out is slow (some 3 microseconds a page on a virtual machine: as long as coding it),
so a payload is not built in one place and copied to another. Python's C interface allows a `bytes` without contents to
be written as long as nobody else holds it.
"""

from __future__ import annotations

import ctypes

import numpy as np

from shoal.codec.frame import Bytes

_make = ctypes.pythonapi.PyBytes_FromStringAndSize
_make.restype, _make.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
_where = ctypes.pythonapi.PyBytes_AsString
_where.restype, _where.argtypes = ctypes.c_void_p, (ctypes.py_object,)


def fresh(size: int) -> tuple[bytes, Bytes]:
    """So many bytes, and the same as an array to write them. The array must be gone before the bytes are used."""
    made: bytes = _make(None, size)
    return made, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(_where(made)))
