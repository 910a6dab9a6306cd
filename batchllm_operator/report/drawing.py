"""Plots as SVG for pages: text stays text, and colours are the page's CSS variables."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What matplotlib draws with; in the SVG, the page's variables take their places.
_VARIABLES: Final = {
    name: f"#0a{index:02x}b7"
    for index, name in enumerate(
        ("ink", "muted", "line", "grid", "decode", "distinct", "prefix", "saved", "limit")
    )
}
_SETTINGS: Final[dict[str, Any]] = {
    "svg.fonttype": "none",
    "font.size": 8.5,
    "text.color": _VARIABLES["ink"],
    "axes.labelcolor": _VARIABLES["muted"],
    "axes.edgecolor": _VARIABLES["line"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "figure.facecolor": "none",
    "grid.color": _VARIABLES["grid"],
    "legend.frameon": False,
    "legend.fontsize": "small",
    "xtick.color": _VARIABLES["muted"],
    "ytick.color": _VARIABLES["muted"],
    "path.simplify": False,
}
_WIDE_INCHES: Final = 10.0
_NARROW_INCHES: Final = 3.7
_NUMBER: Final = re.compile(r"-?[0-9]+[.][0-9]{3,}")
_one_at_a_time = threading.Lock()
"""matplotlib's settings are the whole process's, and pages are made by threads."""


@dataclass(frozen=True, slots=True)
class Table:
    """The numbers behind a plot, as text."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The first cell of each names the row."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture in two shapes, with what stands for it where it can't be seen."""

    title: str
    alt: str
    """What the picture shows, in words."""
    wide: str
    """SVG for pages of a desk and of paper."""
    narrow: str
    """SVG for a phone."""
    table: Table


def colour(name: str) -> str:
    """What matplotlib has to be given for one of the page's colours."""
    return _VARIABLES[name]


def draw(
    title: str,
    alt: str,
    table: Table,
    paint: Callable[[Figure, bool], None],
    *,
    wide_height: float,
    narrow_height: float,
) -> Plot:
    """Draw a plot in both shapes; see `Plot` for title, alt and table.

    `paint` fills a figure; its second argument says whether it is the narrow one. Heights are in
    inches, of ten inches of width and of 3.7.
    """
    wide = _svg(title, alt, (_WIDE_INCHES, wide_height), lambda figure: paint(figure, False))
    narrow = _svg(title, alt, (_NARROW_INCHES, narrow_height), lambda figure: paint(figure, True))
    return Plot(title, alt, wide, narrow, table)


def plain_axes(axes: Axes, *, values_along: str) -> None:
    """Leave a grid and a line on the side of the values only (`x` or `y`)."""
    axes.grid(visible=False, axis="y" if values_along == "x" else "x")
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(side == ("left" if values_along == "x" else "bottom"))


def _svg(title: str, alt: str, inches: tuple[float, float], paint: Callable[[Figure], None]) -> str:
    with _one_at_a_time, _quiet_matplotlib():
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        # The salt makes ids that no other picture of the page has, and the same ones every time.
        settings: Any = {**_SETTINGS, "svg.hashsalt": f"{title} {inches}"}
        with mpl.rc_context(settings):
            figure = Figure(figsize=inches, layout="constrained")
            canvas = FigureCanvasSVG(figure)
            paint(figure)
            text = StringIO()
            # `savefig` would draw it twice.
            canvas.print_svg(text, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return _for_page(text.getvalue(), alt)


def _for_page(svg: str, alt: str) -> str:
    """What of a file is needed inside a page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # Names of parts, which repeat in every picture; what is referred to has a name of its own.
    svg = re.sub(r' id="[A-Za-z0-9.]+(_[0-9]+)+"', "", svg)
    svg = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font: \1px system-ui, sans-serif", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", svg)
    # In tags alone: what is written beside an axis stays as it is.
    svg = re.sub(r"<[^>]*>", lambda tag: _NUMBER.sub(_rounded, tag[0]), svg)
    for name, value in _VARIABLES.items():
        svg = svg.replace(value, f"var(--{name})")
    head, _, body = svg.partition(">")
    (view_box,) = re.findall(r'viewBox="[^"]*"', head)
    return f'<svg {view_box} role="img" aria-label="{escape(alt)}">{body}'.strip()


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}"


@contextmanager
def _quiet_matplotlib() -> Iterator[None]:
    """It remarks on a home that can't be written, where it makes do with a temporary folder."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
