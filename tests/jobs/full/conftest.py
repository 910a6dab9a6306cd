"""DuckDB and polars, which are no part of the environment."""

import os
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[3] / "build/other-programs"


@pytest.fixture(scope="session")
def programs() -> None:
    if not PROGRAMS.exists():
        if "CI" in os.environ:
            pytest.fail(f"there is no {PROGRAMS}: make test-rest makes it")
        pytest.skip(f"there is no {PROGRAMS}: run `make build/other-programs`")
    sys.path.append(str(PROGRAMS))
