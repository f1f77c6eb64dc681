"""Who is in a swarm, how each link stands, how busy all are: as this machine's peer sees it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.cli.options import add_workspace
from shoal.cli.swarm.shared import find
from shoal.errors import TransientError, UsageError
from shoal.journal.suggested import command
from shoal.plain_file import read_object
from shoal.readable import count, duration, short
from shoal.values import LAST_YEAR, BadValue, finite

STALE_S = 10.0
EVENTS = 8
_CLEAR = "\x1b[H\x1b[2J"
Status = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's name")
    parser.add_argument("--json", action="store_true", help="as an object, for programs")
    parser.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    parser.add_argument("--picture", metavar="FILE", help="draw peers and links (.svg, .png, .pdf)")
    add_workspace(parser)


def run(args: argparse.Namespace) -> int:
    from shoal.swarm.control import running

    config = find(args.run, args.workspace)
    while True:
        alive = running(config)
        status = read(config.status_file)
        if status is None and not args.watch:
            hint = "its node has just been started" if alive else f"{command('swarm join', config.run_dir)} starts it"
            raise TransientError(f"peer of {config.run_dir.name} has nothing to tell yet: {hint}.")
        if status is not None:
            if args.json:
                print(json.dumps({**status, "running": alive}), flush=True)
            else:
                text = "\n".join(lines(config.run_dir.name, status, alive, time.time()))
                print(f"{_CLEAR if args.watch and sys.stdout.isatty() else ''}{text}", flush=True)
            if args.picture:
                _draw(status, Path(args.picture))
        if not args.watch:
            return 0
        time.sleep(1.0)


def _draw(status: Status, file: Path) -> None:
    if "stages" in status:
        raise UsageError("--picture draws the exchange of rounds, and a cut model has no rounds: leave it out.")
    from shoal.swarm.route_keeper import routes_of
    from shoal.swarm.topology_picture import draw

    if not status.get("links"):
        raise TransientError(f"{file}: this peer has measured no links yet; try again when it has.")
    members = {str(m.get("peer")): m for m in _objects(status, "members")}
    busy = {peer: share for peer, m in members.items() if (share := finite(m.get("busy"))) is not None}
    try:
        routes = routes_of(status)
    except BadValue as e:
        raise TransientError(f"what this peer says of its links cannot be read ({e}); try again.") from None
    draw(routes, file, lambda peer: str(members.get(peer, {}).get("name") or peer[:8]), busy)


def read(file: Path) -> Status | None:
    try:
        return read_object(file)
    except (FileNotFoundError, BadValue):
        return None


def lines(name: str, status: Status, alive: bool, now: float) -> list[str]:
    members = _objects(status, "members")
    age = now - (finite(status.get("time")) or now)
    cut = "stages" in status
    told = [_cut_head(name, status, len(members)) if cut else _head(name, status, len(members))]
    if not alive:
        told.append(f"this peer is not running; it was {duration(max(age, 0.0))} ago")
    elif age > STALE_S:
        told.append(f"its node has not said anything for {duration(age)}")
    names = {str(m.get("peer")): str(m.get("name")) for m in members if m.get("name")}
    if isinstance(split := status.get("split"), dict):
        sides = (", ".join(_short(peer, names) for peer in _items(side)) for side in _items(split.get("sides")))
        told.append(f"WEIGHTS DIFFER after round {split.get('round')}: {' against '.join(sides)}")
    rows = [["", "PEER", "WAY", "RTT", "UP", "DOWN", "LOST", "HEARD"]]
    rows[0] += ["STAGE", "STATE"] if cut else ["SHARE", "TOKENS/S", "BUSY", "LOSS", "STATE"]
    rows += [[*_link(m, status), *(_cut_row(m) if cut else _row(m, status))] for m in members]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    told += ["", *("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)]
    if isinstance(status.get("topology"), str):
        told += ["", *status["topology"].splitlines()]
    events = _objects(status, "events")[-EVENTS:]
    told += [""] * bool(events) + [_event(e, names) for e in events]
    return told


def _head(name: str, status: Status, members: int) -> str:
    parts = [f"round {status.get('round', '-')}", f"{members} peer{'s' * (members != 1)}"]
    numbers = {key: finite(status.get(key)) for key in ("done", "total", "round_s", "exchange_s", "utilisation")}
    done, total, round_s, exchange_s, busy = numbers.values()
    if done is not None and total:
        parts.append(f"{done / total:.1%} of {count(total)} samples")
    if status.get("branch"):
        parts.append(f"on a branch of its own ({status['branch']})")
    if round_s is not None:
        parts.append(f"a round takes {duration(round_s)}")
    if exchange_s is not None:
        parts.append(f"its exchange {duration(exchange_s)}")
    if busy is not None:
        predicted = finite(status.get("predicted"))
        parts.append(f"busy {busy:.1%}{'' if predicted is None else f' ({predicted:.1%} predicted)'}")
    if status.get("head"):
        parts.append(f"history {str(status['head'])[:8]}")
    return f"{name}: {', '.join(parts)}"


def _cut_head(name: str, status: Status, members: int) -> str:
    """Of a model that is cut over peers."""
    step, steps, stages, wanted, loss = (finite(status.get(k)) for k in ("step", "steps", "stages", "wanted", "loss"))
    parts = [f"step {step or 0:.0f} of {steps or 0:.0f}", f"{stages or 0:.0f} stages"]
    parts.append(f"{members} peer{'s' * (members != 1)}")
    if wanted is not None and not any(m.get("stage") for m in _objects(status, "members")):
        parts.append(f"the first step waits for {wanted:.0f}")
    return f"{name}: {', '.join(parts)}{'' if loss is None else f', loss {loss:.4f}'}"


def _link(member: Status, status: Status) -> list[str]:
    me = member.get("peer") == status.get("self")
    return [
        "*" if me else "",
        str(member.get("name") or str(member.get("peer"))[:8]),
        "here" if me else str(member.get("way") or "away"),
        _said(member, "rtt_s", short),
        _said(member, "up", _rate),
        _said(member, "down", _rate),
        _said(member, "loss", lambda v: f"{v:.2%}"),
        _said(member, "heard_s", lambda v: f"{v:.1f} s"),
    ]


def _cut_row(member: Status) -> list[str]:
    return [_said(member, "stage", count), str(member.get("state"))[:40]]


def _row(member: Status, status: Status) -> list[str]:
    behind = member.get("head") not in (None, status.get("head"))
    state = "late" if member.get("late") else "another head" if behind else "in step"
    if member.get("member") is False:
        state = "not in yet"
    return [
        _said(member, "share", lambda v: f"{v:.1%}"),
        _said(member, "tokens_per_s", count),
        _said(member, "busy", lambda v: f"{v:.1%}"),
        _said(member, "step_loss", lambda v: f"{v:.3f}"),
        state,
    ]


def _said(member: Status, key: str, words: Any) -> str:
    value = finite(member.get(key))
    return "-" if value is None else str(words(value))


def _items(said: object) -> list[Any]:
    """Nothing of what is no list: a view shows what it can make sense of."""
    return said if isinstance(said, list) else []


def _objects(status: Status, key: str) -> list[Status]:
    return [one for one in _items(status.get(key)) if isinstance(one, dict)]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:.3g} Mbit/s"


def _event(event: Status, names: Mapping[str, str]) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(min(max(finite(event.get("time")) or 0.0, 0.0), LAST_YEAR)))
    kind = str(event.get("kind", ""))
    if kind == "record":
        return f"{when} {_record(event, names)}"
    if isinstance(event.get("text"), str):
        return f"{when} {event['text']}"
    rest = [f"{k} {_short(v, names)}" for k, v in event.items() if k not in ("time", "kind") and v not in (None, "")]
    return f"{when} {kind.replace('_', ' ').replace('-', ' ')}: {', '.join(rest)}"


_BRANCHES = {"branch": "a branch of those who hear each other", "merge": "branches merged"}


def _record(event: Status, names: Mapping[str, str]) -> str:
    took, joined = _items(event.get("took")), _items(event.get("joined"))
    left = event["left"] if isinstance(event.get("left"), dict) else {}
    branch = _BRANCHES.get(str(event.get("record")))
    words = [f"round {event.get('round')}", branch or f"parts of {len(took)} of {event.get('members')}"]
    if (exchange_s := finite(event.get("exchange_s"))) is not None:
        words.append(f"exchange {duration(exchange_s)}")
    words += [f"{_short(peer, names)} joined" for peer in joined]
    words += [f"{_short(peer, names)} left ({why})" for peer, why in left.items()]
    return ", ".join(words)


def _short(value: object, names: Mapping[str, str]) -> str:
    """A peer by its name, also where only the beginning of its key is told."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    if len(text) >= 8 and all(c in "0123456789abcdef" for c in text):
        return next((name for peer, name in names.items() if peer.startswith(text)), text[:8])
    return text[:80]
