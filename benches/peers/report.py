"""The table and the bar chart of a comparison."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

SUBJECT = "pagedkv"


@dataclass(frozen=True)
class Figure:
    """One line of the table: a figure of every engine, of several rounds.

    Attributes:
        name: what was measured, with its unit.
        more_is_better: whether a larger figure is the better one.
        values: a figure per round, for each engine, in the same order of rounds.
    """

    name: str
    more_is_better: bool
    values: Mapping[str, Sequence[float]]

    def median(self, engine: str) -> float:
        """The engine's figure."""
        return statistics.median(self.values[engine])

    def best_peer(self) -> str | None:
        """The engine to be compared with; None if there is none."""
        peers = [engine for engine in self.values if engine != SUBJECT]
        if not peers or SUBJECT not in self.values:
            return None
        return (max if self.more_is_better else min)(peers, key=self.median)

    def ratio(self) -> float | None:
        """The subject's figure over the best peer's: the median of the rounds' ratios."""
        peer = self.best_peer()
        if peer is None:
            return None
        pairs = zip(self.values[SUBJECT], self.values[peer], strict=False)
        return statistics.median(own / other for own, other in pairs)


def table(figures: Sequence[Figure], engines: Sequence[str]) -> str:
    """A Markdown table: medians, and the ratio to the best peer."""
    lines = [
        "| | " + " | ".join(engines) + " | ratio to the best peer |",
        "|---|" + "---|" * (len(engines) + 1),
    ]
    for figure in figures:
        cells = [f"{figure.median(engine):.3g}" if engine in figure.values else "-" for engine in engines]
        ratio = figure.ratio()
        lines.append(
            f"| {figure.name} | " + " | ".join(cells) + f" | {'-' if ratio is None else f'{ratio:.2f}'} |"
        )
    return "\n".join(lines)


_WIDTH, _BAR, _GAP, _LABEL = 420, 16, 26, 170
_OWN, _OTHER = "#c2410c", "#64748b"


def chart(figures: Sequence[Figure]) -> str:
    """An SVG document: for each figure a bar per engine, the longest one being the full width."""
    parts: list[str] = []
    top = 12.0
    for figure in figures:
        parts.append(
            f'<text x="8" y="{top + 12}" font-weight="bold">{escape(figure.name)}'
            f" ({'more' if figure.more_is_better else 'less'} is better)</text>"
        )
        top += 20
        longest = max(figure.median(engine) for engine in figure.values)
        for engine in figure.values:
            value = figure.median(engine)
            color = _OWN if engine == SUBJECT else _OTHER
            length = _WIDTH * value / longest
            parts += [
                f'<text x="{_LABEL - 8}" y="{top + 12}" text-anchor="end">{escape(engine)}</text>',
                f'<rect x="{_LABEL}" y="{top}" width="{length:.1f}" height="{_BAR}" fill="{color}"/>',
                f'<text x="{_LABEL + length + 6:.1f}" y="{top + 12}">{value:.3g}</text>',
            ]
            top += _BAR + 4
        top += _GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LABEL + _WIDTH + 80}" height="{top:.0f}"'
        ' font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])
