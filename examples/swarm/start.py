"""Four peers on one machine that believe they are at home, at an office and in a lab: NATs, slow links, a relay.

    sudo .venv/bin/python examples/swarm/start.py [--rtt-ms 100] [--loss 0.001] [--mbit 100] [--cut 40]

Each peer runs in network namespaces of its own, behind a NAT of its own; one more site has a public address and runs
`shoal swarm relay`. The first peer calls `shoal swarm create`, the others `shoal swarm join` with the invitation that
it printed; nobody opens a port. Then `shoal swarm status --watch` shows how it goes, until Ctrl-C. With --cut S, two
peers are cut off from the other two for 30 s, S seconds after all are there: both halves go on, and merge.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from shoal.emulate import Link, Site, Wan, possible
from shoal.errors import ShoalError

ROOT = Path(__file__).resolve().parents[2]
DATA = Path("demo-workspace/data")
PLACE = Path("demo-workspace/swarm")  # a workspace for each peer, in folders with their names
RUN = "swarm"
SHOAL = [sys.executable, "-m", "shoal"]
CUT_S = 30.0
BOLD, DIM, RESET = ("\033[1m", "\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "", "")


def sites(mbit: float) -> list[Site]:
    return [
        Site("anna", "cone", up_mbit=mbit, down_mbit=mbit),
        Site("ben", "cone", up_mbit=mbit / 2, down_mbit=mbit),  # homes send slower than they receive
        Site("office", "symmetric", up_mbit=mbit, down_mbit=mbit),
        Site("lab", "symmetric", up_mbit=mbit, down_mbit=mbit),
        Site("relay", "open", up_mbit=1000, down_mbit=1000),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rtt-ms", type=float, default=100.0, help="between regions; a fifth of it within one")
    parser.add_argument("--loss", type=float, default=0.001, help="share of packets (default 0.001)")
    parser.add_argument("--mbit", type=float, default=100.0, help="of each peer's line (default 100)")
    parser.add_argument("--cut", type=float, metavar="S", help="cut the regions apart for 30 s, after S seconds")
    parser.add_argument("--seconds", type=float, metavar="S", help="end after so long instead of at Ctrl-C")
    args = parser.parse_args()
    os.chdir(ROOT)
    if why := possible():
        print(f"{why} On Debian: sudo {sys.executable} -m scripts.clusters.namespaces", file=sys.stderr)
        return 78
    prepare()
    near = Link(args.rtt_ms / 5, args.loss)
    here = sites(args.mbit)
    with Wan(here, args.rtt_ms, args.loss, {("anna", "ben"): near, ("office", "lab"): near}) as wan:
        try:
            return play(wan, [site for site in here if site.name != "relay"], args.cut, args.seconds)
        except KeyboardInterrupt:
            return 0
        except ShoalError as e:
            print(e, file=sys.stderr)
            return e.exit_code


def play(wan: Wan, peers: list[Site], cut_s: float | None, seconds: float | None) -> int:
    relay = f"http://{wan.address('relay')}:3340"
    say("A relay with a public address")
    first_line(wan, "relay", "swarm relay")
    first, *others = peers
    say(f"{first.name} ({first.nat} NAT) makes the swarm")
    made = first_line(wan, first.name, f"swarm create examples/swarm/run.yaml --relay {relay} --json {options(first)}")
    invitation = PLACE / "invitation"  # a file: on a command line all users of the machine could read it
    invitation.touch(0o600)
    invitation.write_text(json.loads(made)["invitation"])
    for peer in others:
        say(f"{peer.name} ({peer.nat} NAT) joins with the invitation")
        first_line(wan, peer.name, f"swarm join @{invitation} {options(peer)}")
    if cut_s is not None:
        threading.Thread(target=apart, args=(wan, cut_s), daemon=True).start()
    say("How it goes (Ctrl-C ends everything)")
    watch = [*SHOAL, "swarm", "status", RUN, "--watch", "--workspace", str(PLACE / first.name)]
    try:
        return subprocess.run(watch, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return 0


def options(peer: Site) -> str:
    """What a peer computes with and where it mirrors its numbers is its own business; here all four share a machine."""
    own = "resources.processes=1 resources.threads=1 track.mlflow=false"
    return f"--name {peer.name} --workspace {PLACE / peer.name} {own}"


def first_line(wan: Wan, site: str, arguments: str) -> str:
    """Starts the command at the site, which goes on; what it said first. The rest is in its log."""
    shown = f"{arguments[:100]}…" if len(arguments) > 100 else arguments
    print(f"{DIM}{site}$ shoal {shown}{RESET}", flush=True)
    log = PLACE / f"{site}.log"
    with open(log, "w") as out:
        # One thread each: they share this machine's cores.
        process = wan.run(site, [*SHOAL, *shlex.split(arguments)], {"OMP_NUM_THREADS": "1"}, stdout=out, stderr=out)
    while True:
        said = log.read_text()
        if "\n" in said and not said.startswith("shoal: "):
            return said.partition("\n")[0]
        if process.poll() is not None:
            raise ShoalError(f"`shoal {shown}` ended with {process.returncode}; {log} says: {said.strip()[-500:]}")
        time.sleep(0.1)


def apart(wan: Wan, after_s: float) -> None:
    time.sleep(after_s)
    wan.cut({"anna", "ben"}, {"office", "lab"})
    wan.cut({"anna", "ben"}, {"relay"})  # else it would carry what is cut
    time.sleep(CUT_S)
    wan.heal()


def prepare() -> None:
    """Shipped text as tokens, as `make demo` has it; new workspaces for the peers."""
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    if DATA.exists():
        return
    say("Shipped text, as tokens")
    texts = "examples/text/moby-dick.txt examples/text/state-of-the-union.jsonl"
    tokenizer = DATA.parent / "tokenizer.json"
    for arguments in (
        f"data tokenizer {texts} --vocab-size 2048 --out {tokenizer}",
        f"data prepare {texts} --separator '\\n\\n\\n' --tokenizer {tokenizer} --eval-fraction 0.05 --out {DATA}",
    ):
        subprocess.run([*SHOAL, *shlex.split(arguments)], check=True)


def say(text: str) -> None:
    print(f"{BOLD}{text}{RESET}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
