"""Plots as SVG for pages, with text as text and the page's CSS variables as colours."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Placeholder colours for matplotlib, replaced in the SVG by the page's variables.
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
"""matplotlib's settings are global, and pages are rendered in threads."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture in two shapes, with a text and a table as alternatives.

    The pictures are safe: they hold no text from tables or prompts, and labels as matplotlib
    escapes them.
    """

    title: str
    alt: str
    """The picture in words."""
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The numbers behind the picture; the first cell of a row is its name."""
    wide: Markup
    """SVG for wide screens and print; empty, like `narrow`, if matplotlib isn't installed."""
    narrow: Markup
    """SVG for phones."""


def colour(name: str) -> str:
    """matplotlib's placeholder for one of the page's colours."""
    return _VARIABLES[name]


def draw(
    title: str,
    alt: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    paint: Callable[[Figure, bool], None],
    *,
    heights: tuple[float, float],
) -> Plot:
    """Draw a plot in both shapes; see `Plot` for its texts.

    `paint` fills a figure; its second argument is True for the narrow one. Heights are those of
    the wide and of the narrow shape in inches, for widths of 10 and 3.7 inches.
    """
    if not can_draw():
        return Plot(title, alt, headers, rows, Markup(), Markup())
    wide, narrow = heights
    return Plot(
        title,
        alt,
        headers,
        rows,
        Markup(_svg(title, alt, (_WIDE_INCHES, wide), lambda figure: paint(figure, False))),
        Markup(_svg(title, alt, (_NARROW_INCHES, narrow), lambda figure: paint(figure, True))),
    )


def can_draw() -> bool:
    """Whether matplotlib is installed, which comes with the extra `report`."""
    try:
        return find_spec("matplotlib") is not None
    except ModuleNotFoundError:
        return False


def short_number(value: float, position: float = 0.0) -> str:
    """Numbers for axes, such as `950`, `12 k`, `3.5 M`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size or (abs(value) >= size and value % size == 0):
            return f"{value / size:,.3g} {unit}"
    return f"{value:,.4g}"


def plain_axes(axes: Axes, *, values_along: str) -> None:
    """Remove grid and axis line except for the values' axis (`x` or `y`)."""
    axes.grid(visible=False, axis="y" if values_along == "x" else "x")
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(side == ("left" if values_along == "x" else "bottom"))


def _svg(title: str, alt: str, inches: tuple[float, float], paint: Callable[[Figure], None]) -> str:
    with _one_at_a_time, quiet_matplotlib():
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        # The salt makes ids unique within the page, and reproducible.
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
    """The part of an SVG file that a page needs, without fonts and fixed colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # Ids of parts repeat in every picture; those that are referred to have another form.
    svg = re.sub(r' id="[A-Za-z0-9.]+(_[0-9]+)+"', "", svg)
    svg = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font: \1px system-ui, sans-serif", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", svg)
    # Only in tags: labels of axes stay unchanged.
    svg = re.sub(r"<[^>]*>", lambda tag: _NUMBER.sub(_rounded, tag[0]), svg)
    for name, value in _VARIABLES.items():
        svg = svg.replace(value, f"var(--{name})")
    head, _, body = svg.partition(">")
    (view_box,) = re.findall(r'viewBox="[^"]*"', head)
    return f'<svg {view_box} role="img" aria-label="{escape(alt)}">{body}'.strip()


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}"


@contextmanager
def quiet_matplotlib() -> Iterator[None]:
    """Silence matplotlib's warnings about an unwritable home, and about characters without a glyph.

    Both are harmless: text is drawn by the reader's browser.
    """
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            yield
    finally:
        logger.setLevel(level)
