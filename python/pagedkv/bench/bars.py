"""The plot of what sharing saves: bars, as SVG by hand like those of `plot`."""

from collections.abc import Sequence
from html import escape

from pagedkv.bench.plot import svg
from pagedkv.bench.sharing import Outcome

_LEFT, _TOP, _WIDTH = 230, 28, 330
_BAR, _GAP, _PANEL_GAP = 14, 6, 40
_SHARED, _SEPARATE = "#1d4ed8", "#c2410c"
_MEASURES = (
    ("prompt_tokens", "prompt tokens computed"),
    ("peak_blocks", "most blocks held"),
    ("wall_s", "seconds"),
)


def _panel(outcomes: Sequence[Outcome], measure: str, title: str, top: float) -> list[str]:
    """One measure of one group: a bar for each case, the longest as wide as the panel."""
    values = [float(getattr(outcome, measure)) for outcome in outcomes]
    most = max(values) or 1.0
    parts = [f'<text x="{_LEFT}" y="{top - 8}">{escape(title)}</text>']
    for place, (outcome, value) in enumerate(zip(outcomes, values, strict=True)):
        y = top + place * (_BAR + _GAP)
        width = _WIDTH * value / most
        color = _SHARED if outcome.name.startswith("one request") else _SEPARATE
        shown = f"{value:.2f}" if measure == "wall_s" else f"{value:.0f}"
        parts += [
            f'<text x="{_LEFT - 6}" y="{y + 11}" text-anchor="end">{escape(outcome.name)}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{color}"/>',
            f'<text x="{_LEFT + width + 5:.1f}" y="{y + 11}">{shown}</text>',
        ]
    return parts


def sharing(outcomes: Sequence[Outcome]) -> str:
    """An SVG document with a panel for each measure of each group."""
    parts = []
    top = float(_TOP)
    for group in dict.fromkeys(outcome.group for outcome in outcomes):
        of_group = [outcome for outcome in outcomes if outcome.group == group]
        for measure, title in _MEASURES:
            parts += _panel(of_group, measure, f"{group}: {title}", top)
            top += len(of_group) * (_BAR + _GAP) + _PANEL_GAP
    return svg(_LEFT + _WIDTH + 70, top - _PANEL_GAP + 16, parts)
