"""Times and prices in units that read well."""

from __future__ import annotations

import pytest

from batchllm_operator.report.pages import usd
from batchllm_operator.report.summary import _duration


@pytest.mark.parametrize(
    ("seconds", "printed"),
    [(0.0, "0 s"), (0.0123, "0.0123 s"), (72.6, "72.6 s"), (141.6, "2.36 min"), (9000.0, "2.5 h")],
)
def test_durations(seconds: float, printed: str) -> None:
    assert _duration(seconds) == printed


@pytest.mark.parametrize(
    ("amount", "printed"), [(0.0, "$0.00"), (0.004, "under $0.01"), (1234.5, "$1,234.50")]
)
def test_prices(amount: float, printed: str) -> None:
    assert usd(amount) == printed
