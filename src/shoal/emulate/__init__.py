"""A wide area network on one machine: namespaces, NATs, delay, loss and cuts. docs/decisions/039."""

from shoal.emulate.nat import Nat
from shoal.emulate.possible import possible
from shoal.emulate.wan import Counters, Link, Site, Wan

__all__ = ["Counters", "Link", "Nat", "Site", "Wan", "possible"]
