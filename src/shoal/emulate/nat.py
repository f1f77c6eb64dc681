"""What stands between a peer and the internet: rules for nftables, in a router's namespace.

- `cone`: what home routers do. A port of the peer is the same port outside, whoever it talks to, so two such peers
  that know each other's address can punch a hole; packets of strangers are dropped (conntrack filters by address and
  port: a "port restricted" cone).
- `symmetric`: each destination sees another, random port. Nobody can guess it, so two of them, or one and a cone, need
  a relay.
- `firewall`: the same, and no UDP at all, as in some offices: only TCP gets out, to a relay say.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import Literal

from shoal.errors import SetupError

Nat = Literal["open", "cone", "symmetric", "firewall"]
_RULES = """\
table ip nat {{
  chain post {{
    type nat hook postrouting priority 100;
    oifname "wan" masquerade {how}
  }}
}}
table ip guard {{
  chain input {{
    type filter hook input priority 0; policy drop;
    ct state established,related accept
    iifname "lan" accept
    icmp type echo-request accept
  }}
  chain forward {{
    type filter hook forward priority 0; policy drop;
    {no_udp}
    ct state established,related accept
    iifname "lan" oifname "wan" accept
  }}
}}
"""


def guard(nat: Nat) -> None:
    """In the calling thread's namespace, whose devices are `lan` and `wan`."""
    rules = _RULES.format(
        how="" if nat == "cone" else "fully-random", no_udp="udp dport 1-65535 drop" * (nat == "firewall")
    )
    program = shutil.which("nft")
    if program is None:
        raise SetupError("NATs need `nft`: install the package nftables (`python -m scripts.clusters.namespaces`).")
    done = subprocess.run([program, "-f", "-"], input=rules, capture_output=True, text=True)
    if done.returncode:
        raise SetupError(f"This kernel refuses the rules of a NAT: {done.stderr.strip().splitlines()[0]}.")
