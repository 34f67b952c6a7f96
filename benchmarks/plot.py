"""Draws docs/waiting.svg: the distribution of the waiting times for one hot name, from a run of P6."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 50, 50
FROM, TO = 1e-5, 10.0  # seconds
COLOURS = ("#2563eb", "#0d9488", "#dc2626", "#d97706", "#9333ea")  # readable on light and on dark pages
INK = "#888888"
POINTS = 300


def draw(path: Path, title: str, waits: Mapping[str, Sequence[float]]) -> None:
    """Draw, for each side, the share of its acquires that were served within a time."""
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'font-size="12">'
        ),
        f'<text x="{LEFT}" y="20" fill="{INK}" font-size="14">{title}</text>',
        *_grid(),
    ]
    for number, (name, times) in enumerate(waits.items()):
        colour, x = COLOURS[number % len(COLOURS)], LEFT + 130 * number
        parts.append(f'<path d="{_curve(sorted(times))}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<rect x="{x}" y="30" width="12" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="36" fill="{colour}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", "utf-8")


def _grid() -> list[str]:
    parts = []
    for exponent in range(round(math.log10(FROM)), round(math.log10(TO)) + 1):
        x, time = _x(10.0**exponent), 10.0**exponent
        written = f"{time:g} s" if time >= 1 else f"{time * 1e3:g} ms" if time >= 1e-3 else f"{time * 1e6:g} us"
        parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{INK}" stroke-opacity="0.3"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" fill="{INK}" text-anchor="middle">{written}</text>')
    for percent in (0, 25, 50, 75, 100):
        y = _y(percent / 100)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{INK}" stroke-opacity="0.3"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" fill="{INK}" text-anchor="end">{percent} %</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    label = "time from the acquire to the grant; the share of acquires that took at most this long"
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" fill="{INK}" text-anchor="middle">{label}</text>')
    return parts


def _curve(times: Sequence[float]) -> str:
    last = len(times) - 1
    shares = [each / POINTS for each in range(POINTS)] + [0.999, 0.9999, 1.0]
    return "M" + "L".join(f"{_x(times[round(share * last)]):.1f} {_y(share):.1f}" for share in shares)


def _x(seconds: float) -> float:
    share = math.log10(min(max(seconds, FROM), TO) / FROM) / math.log10(TO / FROM)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
