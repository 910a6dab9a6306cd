"""Stages of jobs, most of which commit."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def pages_without_pictures(no_pictures: None) -> None:
    """What is on pages is looked at in `tests/report`; `test_run_report.py` has them whole."""
