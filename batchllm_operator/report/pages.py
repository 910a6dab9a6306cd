"""Renders HTML pages from templates; all values are escaped."""

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from batchllm_operator import __version__, progress
from batchllm_operator.amounts import clipped, counted

_UNKNOWN: Final = "unknown"
_MAX_BAR_NAME: Final = 32

Trail = Sequence[tuple[str, str]]
"""Text and URL of links, such as those to the pages above, the topmost first."""


def render(template: str, *, trail: Trail = (), actions: Trail = (), **values: Any) -> str:
    """Render one of `templates/` as a self-contained page.

    `trail` are the pages above this one, `actions` its links to files, `values` its content.
    """
    page = _environment().get_template(template)
    return page.render(trail=trail, actions=actions, version=__version__, **values)


def render_text(template: str, **values: Any) -> str:
    """Render one of `templates/` as text for a terminal, in which nothing is escaped."""
    text = _environment().overlay(autoescape=False).get_template(template).render(**values)
    return text.rstrip("\n")


def count(value: int | float | None) -> str:
    return _UNKNOWN if value is None else f"{value:,.0f}"


def ratio(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def percent(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.1%}"


def mean(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:,.4g}" if abs(value) < 9999.5 else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Seconds in a readable unit, such as `12 s`, `3 min 20 s` or `2 h 05 min`."""
    if seconds is None:
        return _UNKNOWN
    return f"{seconds:.3g} s" if seconds < 10 else progress.duration(seconds)


def usd(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    if 0 < abs(value) < 0.01:
        return "under $0.01"
    return f"{'-' if value < 0 else ''}${abs(value):,.2f}"


def bar_name(text: str) -> str:
    """Any text as the name of a bar."""
    return clipped(text if text.isprintable() else repr(text), _MAX_BAR_NAME)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("batchllm_operator.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (count, counted, mean, percent, ratio, duration, usd, bar_name)
    environment.filters.update({function.__name__: function for function in filters})
    return environment
