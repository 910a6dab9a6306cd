"""The benchmark of large tables, over small ones: its figures are there, and its check can fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from support.benchmark_modules import load, run


def test_it_runs_and_its_last_line_is_json(tmp_path: Path) -> None:
    args = ["--rows", "300,20", "--formats", "delta", "--repetitions", "2", "--characters", "50"]
    found = run(tmp_path, "lake", *args, "--root", str(tmp_path))
    assert [row["num_rows"] for row in found["rows"]] == [20, 300]
    for row in found["rows"]:
        assert set(row["peak_bytes"]) == {"plan", "run", "commit"}
        assert min(row["peak_bytes"].values()) > 10 << 20
        assert len(row["commit_s"]) == len(row["write_s"]["zstd"]) == 2
    assert set(found["growth"]["delta"]) == {"plan", "run", "commit"}
    assert found["commit_ratio"]["delta"] == found["rows"][-1]["commit_ratio"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "lengths"), [((0, 2), (5, 5)), ((0, 0), (5, 5)), ((0,), (5,)), ((0, 1), (5, 4))]
)
def test_rows_that_are_not_the_inputs_stop_it(
    keys: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    stage = load("lake_stage")

    def published(keys: tuple[int, ...], lengths: tuple[int, ...]) -> SimpleNamespace:
        texts = ["x" * length for length in lengths]
        rows = pa.table({"row_key": [f"row-{key}" for key in keys], "generated_text": texts})
        return SimpleNamespace(output=lambda: rows)

    stage.check(published((1, 0), (5, 5)), 2, 5)
    with pytest.raises(SystemExit, match="no figures"):
        stage.check(published(keys, lengths), 2, 5)
