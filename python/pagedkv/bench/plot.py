"""The plot of a replay, written as SVG by hand: what is drawn is a few lines and their axes."""

from collections.abc import Sequence
from html import escape

from pagedkv.bench.replay import Outcome

_WIDTH, _HEIGHT = 640, 160
_LEFT, _TOP, _GAP = 70, 24, 64
_COLORS = {"owned": "#c2410c", "idle": "#1d4ed8"}


def _panel(outcome: Outcome, top: float, label: str) -> list[str]:
    """One replay: blocks held by requests, and above them the idle ones."""
    points = outcome.points
    last = max((point.at for point in points), default=0.0) or 1.0
    title = f"{outcome.policy}, {outcome.blocks} blocks: {outcome.token_hit_ratio:.4f} of prompt tokens found"
    bottom = top + _HEIGHT

    def place(at: float, blocks: int) -> str:
        return f"{_LEFT + _WIDTH * at / last:.1f},{bottom - _HEIGHT * blocks / outcome.blocks:.1f}"

    owned = " ".join(place(point.at, point.owned) for point in points)
    used = " ".join(place(point.at, point.owned + point.idle) for point in points)
    return [
        f'<text x="{_LEFT}" y="{top - 8}">{escape(title)}</text>',
        f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{_LEFT - 6}" y="{top + 10}" text-anchor="end">{outcome.blocks}</text>',
        f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="{_LEFT + _WIDTH}" y="{bottom + 16}" text-anchor="end">{last:.0f} {escape(label)}</text>',
        f'<polyline points="{used}" fill="none" stroke="{_COLORS["idle"]}"/>',
        f'<polyline points="{owned}" fill="none" stroke="{_COLORS["owned"]}"/>',
    ]


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    """A document of this size, in pixels, on white."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
        ' font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def blocks_in_use(outcomes: Sequence[Outcome], label: str) -> str:
    """An SVG document with one panel for each replay; `label` names the unit of the horizontal axis."""
    height = _TOP + len(outcomes) * (_HEIGHT + _GAP)
    parts = []
    for number, outcome in enumerate(outcomes):
        parts += _panel(outcome, _TOP + number * (_HEIGHT + _GAP), label)
    legend = " ".join(
        f'<tspan fill="{_COLORS[kind]}">{text}</tspan>'
        for kind, text in (("owned", "held by requests"), ("idle", "held or idle"))
    )
    parts.append(f'<text x="{_LEFT}" y="{height}">{legend}</text>')
    return svg(_LEFT + _WIDTH + 20, height + 16, parts)
