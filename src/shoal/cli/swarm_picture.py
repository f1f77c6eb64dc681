"""A picture of a swarm: its peers in a circle, and the links between them as they are used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from shoal.observe.words import short

SIZE, RADIUS, DOT = 760, 270, 26
COLOURS = {"tcp": "#1a7f37", "direct": "#0969da", "relay": "#bc4c00"}
AWAY = "#8c959f"
WAYS = {"tcp": "TCP", "direct": "QUIC, direct", "relay": "through a relay", None: "not connected"}


def picture(status: Mapping[str, Any]) -> str:
    """As SVG. Where the status has `links` between others ({a, b, way, rtt_s, up}) those are drawn too."""
    members = [m for m in status.get("members") or [] if isinstance(m, dict)]
    me = status.get("self")
    middle = SIZE / 2
    places: dict[str, tuple[float, float]] = {}
    for i, member in enumerate(members):
        angle = 2 * math.pi * i / max(1, len(members)) - math.pi / 2
        places[str(member.get("peer"))] = (middle + RADIUS * math.cos(angle), middle + RADIUS * math.sin(angle))
    drawn = [_link(places, a, b, link) for (a, b), link in _links(status, members, me).items()]
    drawn += [_peer(places[str(m.get("peer"))], m, m.get("peer") == me) for m in members]
    title = f"round {status.get('round', '-')}, {len(members)} peers"
    if isinstance(status.get("utilisation"), int | float):
        title += f", busy {status['utilisation']:.1%}"
    if isinstance(status.get("predicted"), int | float):
        title += f" ({status['predicted']:.1%} predicted)"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE + 40}" font-family="sans-serif">',
            f'<rect width="{SIZE}" height="{SIZE + 40}" fill="white"/>',
            f'<text x="{middle}" y="30" text-anchor="middle" font-size="18">{escape(title)}</text>',
            *drawn,
            *_legend(),
            "</svg>",
            "",
        ]
    )


def _links(status: Mapping[str, Any], members: list[Any], me: Any) -> dict[tuple[str, str], Mapping[str, Any]]:
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for link in status.get("links") or []:
        if isinstance(link, dict):
            a, b = sorted((str(link.get("a")), str(link.get("b"))))
            found[a, b] = link
    for member in members:  # what this peer has measured itself wins
        if member.get("peer") != me:
            a, b = sorted((str(me), str(member.get("peer"))))
            found[a, b] = member
    return found


def _link(places: Mapping[str, tuple[float, float]], a: str, b: str, link: Mapping[str, Any]) -> str:
    if a not in places or b not in places:
        return ""
    (x1, y1), (x2, y2), way = places[a], places[b], link.get("way")
    rate = link.get("up") if isinstance(link.get("up"), int | float) else 0.0
    width = 1.5 + min(6.0, math.log10(1 + float(rate or 0.0) / 1e5) * 2)
    dashed = "" if way in COLOURS else ' stroke-dasharray="3 6"'
    line = (
        f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="{COLOURS.get(str(way), AWAY)}" '
        f'stroke-width="{width:.1f}" stroke-opacity="0.7"{dashed}/>'
    )
    words = [short(float(link["rtt_s"]))] if isinstance(link.get("rtt_s"), int | float) else []
    words += [f"{float(rate) * 8 / 1e6:.3g} Mbit/s"] if rate else []
    words += [f"{float(link['loss']):.1%} lost"] if isinstance(link.get("loss"), int | float) and link["loss"] else []
    x, y = 0.4 * x1 + 0.6 * x2, 0.4 * y1 + 0.6 * y2
    return f'{line}<text x="{x:.0f}" y="{y:.0f}" font-size="11" fill="#57606a">{escape(", ".join(words))}</text>'


def _peer(place: tuple[float, float], member: Mapping[str, Any], me: bool) -> str:
    x, y = place
    busy = member.get("busy")
    fill = AWAY if not me and member.get("way") is None else "#bf8700" if member.get("late") else "#1f6feb"
    told = [str(member.get("name") or str(member.get("peer"))[:8])]
    told += [f"{float(busy):.0%} busy"] if isinstance(busy, int | float) else []
    ring = ' stroke="black" stroke-width="3"' if me else ""
    texts = "".join(
        f'<text x="{x:.0f}" y="{y + DOT + 16 + 14 * i:.0f}" text-anchor="middle" font-size="13">{escape(text)}</text>'
        for i, text in enumerate(told)
    )
    return f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{DOT}" fill="{fill}"{ring}/>{texts}'


def _legend() -> list[str]:
    return [
        f'<line x1="{20 + 180 * i}" y1="{SIZE + 20}" x2="{50 + 180 * i}" y2="{SIZE + 20}" stroke-width="4" '
        f'stroke="{COLOURS.get(str(way), AWAY)}"/><text x="{58 + 180 * i}" y="{SIZE + 25}" font-size="13">{text}</text>'
        for i, (way, text) in enumerate(WAYS.items())
    ]
