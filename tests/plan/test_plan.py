"""The plan stage: deterministic, every row once, nothing left behind by a refusal."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from plan.test_cut import read_shards
from support.fake_job import DS, document_rows, fake_spec, planned, write_table

from batchllm_operator.errors import FailedRowsError, StorageError
from batchllm_operator.lake import ParquetTable
from batchllm_operator.plan import given as plan_module
from batchllm_operator.plan.memory import MemoryBudget
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.prefixes import TokenTable
from batchllm_operator.prompts import TokenIdsDifferError, load_tokenizer
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.stored_plan import StoredPlan


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def requests(plan: StoredPlan) -> list[dict[str, Any]]:
    """All requests of a plan, shard after shard."""
    return [row for shard in read_shards(plan) for row in shard]


def test_same_input_same_bytes(tmp_path: Path) -> None:
    first = planned(tmp_path, document_rows())
    before = contents(tmp_path / "out")
    assert plan_job(fake_spec(tmp_path), DS).folder == first.folder
    assert contents(tmp_path / "out") == before


def test_the_order_of_rows_changes_neither_groups_nor_saving(tmp_path: Path) -> None:
    rows = document_rows()
    shuffled = random.Random(0).sample(rows, len(rows))
    prompts, counts = [], []
    for name, variant in (("a", rows), ("b", shuffled)):
        plan = planned(tmp_path / name, variant)
        prompts.append([request["prompt_token_ids"] for request in requests(plan)])
        counts.append(plan.manifest.counts)
    assert prompts[0] == prompts[1]
    assert counts[0] == counts[1]


def test_duplicates_are_one_request_under_greedy_sampling_only(tmp_path: Path) -> None:
    rows = document_rows(2, 2)
    rows += [{**rows[0], "row_key": "again"}, {**rows[0], "row_key": "and again"}]
    greedy = planned(tmp_path, rows)
    assert greedy.manifest.counts.num_requests == 4
    assert greedy.manifest.counts.num_duplicate_rows == 2
    assert [0, 4, 5] in [request["row_idxs"] for request in requests(greedy)]
    sampled = plan_job(fake_spec(tmp_path, sampling={"temperature": 0.7}), DS)
    assert sampled.manifest.counts.num_requests == 6


def test_a_changed_input_is_another_plan_and_engine_tuning_is_not(tmp_path: Path) -> None:
    rows = document_rows()
    plan = planned(tmp_path, rows)
    tuned = plan_job(fake_spec(tmp_path, engine={"max_num_seqs": 7}), DS)
    assert tuned.folder == plan.folder
    assert tuned.manifest.spec.engine.max_num_seqs == 7
    assert planned(tmp_path, [{**rows[0], "query": "changed!"}, *rows[1:]]).folder != plan.folder


def test_an_input_that_changes_under_the_plan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "documents", document_rows())
    scan = ParquetTable.scan

    def scan_with_a_change(*args: Any) -> Iterator[pa.RecordBatch]:
        batches = scan(*args)
        first = next(batches)
        write_table(tmp_path / "documents", document_rows(2, 2))
        yield first
        yield from batches

    monkeypatch.setattr(ParquetTable, "scan", scan_with_a_change)
    with pytest.raises(StorageError, match="changed while it was read"):
        plan_job(fake_spec(tmp_path), DS)
    assert not (tmp_path / "out").exists()


def test_rejected_rows_beyond_the_limit_make_no_plan(tmp_path: Path) -> None:
    rows = document_rows(2, 5)
    rows[1]["query"] = rows[2]["query"] = None
    write_table(tmp_path / "documents", rows)
    with pytest.raises(FailedRowsError) as refused:
        plan_job(fake_spec(tmp_path, max_failed_fraction=0.15), DS)
    for part in (
        "2 of 10 rows failed, 20.0 % (2 null_value), more than max_failed_fraction 0.15 allows",
        "; no plan was made. First null_value: row_key d1-q0: \"null_value: column 'query' is null",
        "raise max_failed_fraction in the spec, and plan again",
    ):
        assert part in str(refused.value)
    assert not (tmp_path / "out").exists()
    assert plan_job(fake_spec(tmp_path, max_failed_fraction=0.2), DS).manifest.counts.num_rows == 10


def test_a_plan_without_all_its_files_has_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "documents", document_rows())
    publish_file, published = Folder.publish_file, []

    def fails_at_the_last(self: Folder, source: Path, name: str) -> None:
        published.append(name)
        if len(published) == 3:
            raise StorageError("no space left on device")
        publish_file(self, source, name)

    monkeypatch.setattr(Folder, "publish_file", fails_at_the_last)
    with pytest.raises(StorageError):
        plan_job(fake_spec(tmp_path), DS)
    assert len(published) == 3
    assert not list((tmp_path / "out").rglob("manifest.json"))
    monkeypatch.undo()
    plan = plan_job(fake_spec(tmp_path), DS)
    assert StoredPlan.open(plan.folder.uri) == plan


def test_token_ids_that_prove_wrong_are_all_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = planned(tmp_path, document_rows()).manifest
    tokenizer = load_tokenizer(fake_spec(tmp_path), DS)
    encode = tokenizer.encode
    num_calls = 0

    def encode_and_find_a_difference(texts: list[str]) -> TokenTable:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise TokenIdsDifferError("3 prompts to encode again")
        return encode(texts)

    monkeypatch.setattr(tokenizer, "encode", encode_and_find_a_difference)
    monkeypatch.setattr(plan_module, "load_tokenizers", lambda *_: (tokenizer,))
    budgets: list[MemoryBudget] = []
    check = MemoryBudget.check

    def check_and_note(self: MemoryBudget, *sizes: Any) -> None:
        budgets.append(self)
        check(self, *sizes)

    monkeypatch.setattr(MemoryBudget, "check", check_and_note)
    assert plan_job(fake_spec(tmp_path), DS).manifest == expected
    assert num_calls == 2
    assert len(set(budgets)) == 1  # what the first attempt had in memory doesn't count


def test_long_constant_text_is_rendered_a_few_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "documents", document_rows(100, 5))
    system = "You answer questions. " * 2000
    spec = fake_spec(tmp_path, prompt={"system": system}, max_failed_fraction=1.0)
    tokenizer = load_tokenizer(spec, DS)
    encode = tokenizer.encode
    sizes: list[int] = []

    def encode_and_count(texts: list[str]) -> TokenTable:
        sizes.append(sum(map(len, texts)))
        return encode(texts)

    monkeypatch.setattr(tokenizer, "encode", encode_and_count)
    monkeypatch.setattr(plan_module, "load_tokenizers", lambda *_: (tokenizer,))
    plan_job(spec, DS)
    assert sum(sizes) > 3 * (4 << 20)
    assert max(sizes) < 1.1 * (4 << 20)
