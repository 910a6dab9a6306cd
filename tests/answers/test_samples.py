"""Several answers to a row, and log-probabilities of their tokens."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.answers_job import asking, published, run_and_commit
from support.fake_job import DS, document_rows, expected_prompt, write_table
from support.lake_tables import LAKES

from batchllm_operator.engine.fake import fake_logprobs, fake_text
from batchllm_operator.errors import SpecError

SAMPLED = {"temperature": 0.7, "seed": 3, "n": 3}
SCORED = {"max_tokens": 4, "logprobs": 2}


def test_each_row_has_all_its_texts(tmp_path: Path) -> None:
    rows = [*document_rows(3, 2), {"row_key": "none", "document": None, "query": "q"}]
    rows[3] = {**rows[2], "row_key": "a copy, which is sampled apart"}
    write_table(tmp_path / "documents", rows)
    spec = asking(tmp_path, sampling=SAMPLED, max_failed_fraction=0.5)
    plan = run_and_commit(spec)
    assert plan.manifest.counts.num_duplicate_rows == 0
    *found, without = published(spec)
    assert without["generated_texts"] is without["generated_text"] is None
    for each, row in zip(found, rows, strict=False):
        assert each["generated_text"] == fake_text(list(expected_prompt(row).encode()))
        assert each["generated_texts"][0] == each["generated_text"]
        assert len(set(each["generated_texts"])) == 3


def test_logprobs_and_their_mean(tmp_path: Path) -> None:
    rows = [*document_rows(3, 2), {"row_key": "none", "document": None, "query": "q"}]
    write_table(tmp_path / "documents", rows)
    spec = asking(tmp_path, sampling=SCORED, max_failed_fraction=0.5)
    run_and_commit(spec)
    *found, without = published(spec)
    names = ("mean_logprob", "token_logprobs", "top_logprobs")
    assert all(without[name] is None for name in names)
    for each, row in zip(found, rows, strict=False):
        wanted = fake_logprobs(list(expected_prompt(row).encode()), 4)
        assert each["token_logprobs"] == wanted
        assert each["mean_logprob"] == pytest.approx(fmean(wanted))
        tops = [[place["token"] for place in places] for places in each["top_logprobs"]]
        assert tops == [["token 0", "token 1"]] * 4


def test_no_top_tokens_without_a_wish_for_them(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(1, 2))
    run_and_commit(asking(tmp_path, sampling={"logprobs": 0}))
    schema = pq.read_schema(tmp_path / "out" / f"ds={DS}" / "data.parquet")
    assert schema.field("token_logprobs").type == pa.list_(pa.float64())
    assert "top_logprobs" not in schema.names


@pytest.mark.parametrize("sampling", [SAMPLED, SCORED])
@pytest.mark.parametrize("kind", LAKES)
def test_every_format_holds_them(
    kind: str, sampling: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = (
        LAKES[kind](str(tmp_path), tmp_path, monkeypatch, name) for name in ("docs", "out")
    )
    rows = document_rows(2, 2)
    source.append(DS, pa.Table.from_pylist(rows))
    spec = asking(
        tmp_path,
        sampling=sampling,
        input={"uri": source.address, "key": "row_key"},
        output={"uri": target.address, "staging_uri": target.staging},
    )
    run_and_commit(spec)
    found = published(spec)
    assert len(found) == len(rows)
    names = [name for name in found[0] if "logprob" in name or name == "generated_texts"]
    assert names
    assert all(row[name] for row in found for name in names)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"n": 2}, "greedy sampling gives the same answer"),
        ({"n": 0, "temperature": 1}, "at least 1"),
        ({"n": 2, "temperature": 1, "logprobs": 1}, "leave out n or logprobs"),
        ({"logprobs": 21}, "at most 20"),
        ({"logprobs": -1}, "at least 0"),
    ],
)
def test_what_does_not_fit_is_refused(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        asking("/lake", sampling=sampling)
