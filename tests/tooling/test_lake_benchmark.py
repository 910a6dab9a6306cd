"""The benchmark of large tables: its check can fail."""

from types import SimpleNamespace

import pyarrow as pa
import pytest
from support.benchmark_modules import load


@pytest.mark.parametrize(
    ("keys", "lengths"), [((0, 2), (5, 5)), ((0, 0), (5, 5)), ((0,), (5,)), ((0, 1), (5, 4))]
)
def test_rows_that_are_not_the_inputs_stop_it(
    keys: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    stage = load("lake")

    def published(keys: tuple[int, ...], lengths: tuple[int, ...]) -> SimpleNamespace:
        texts = ["x" * length for length in lengths]
        rows = pa.table({"row_key": [f"row-{key}" for key in keys], "generated_text": texts})
        return SimpleNamespace(characters=5, tables=SimpleNamespace(output=lambda: rows))

    stage.check(published((1, 0), (5, 5)), 2)
    with pytest.raises(SystemExit, match="no figures"):
        stage.check(published(keys, lengths), 2)
