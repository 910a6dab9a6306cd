"""The persisted plan: equal bytes for equal plans, and no plan at all if a byte is wrong."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchllm_operator.errors import ExitCode, PlanError
from batchllm_operator.prefixes import PrefixGroups, Requests, TokenTable
from batchllm_operator.prefixes.sharing import Histogram, PlanSharing
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.counts import PlanCounts
from batchllm_operator.stored_plan.manifest import (
    DataFile,
    LearnedOutputs,
    LengthBucket,
    PlanManifest,
    ShardInfo,
    _digest,
    _dump,
    compute_plan_id,
    describe_file,
)
from batchllm_operator.stored_plan.shard_files import (
    PART_TOKENS,
    SHARD_SCHEMA,
    part_bounds,
    shard_file,
    write_shard,
)

FILES = {
    "rows.parquet": DataFile(size_bytes=10, sha256="a" * 64),
    "shard-00000.parquet": DataFile(size_bytes=20, sha256="b" * 64),
}


def make_spec(**changes: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "spec_version": 1,
            "name": "snippets",
            "input": {
                "uri": "/lake/in",
                "key": ["id", "naïve 表"],
                "filter": [
                    {"column": "n", "op": "in", "value": [1, 2.5, True, "x"]},
                    {"column": "ok", "value": True},
                ],
            },
            "prompt": {"template": '{{"q": "{query}"}}\n', "system": "Grüße 🙂"},
            "model": {"path": "/models/tiny"},
            "sampling": {"temperature": 0.1, "stop": ["a", "b"]},
            "output": {"uri": "/lake/out"},
            "engine": {"extra_args": {"a": [1, {"b": None}], "c": 1e-7}},
            **changes,
        }
    )


def make_manifest(**changes: Any) -> PlanManifest:
    spec = changes.pop("spec", make_spec())
    counts = PlanCounts(
        num_rows=7,
        num_rejected_rows=1,
        num_duplicate_rows=2,
        num_requests=4,
        num_groups=3,
        num_shared_groups=1,
        num_logical_tokens=30,
        num_planned_tokens=20,
        num_optimal_tokens=19,
        num_algorithm_1_saved_tokens=6,
        num_exact_saved_tokens=6,
    )
    shard = ShardInfo(
        file="shard-00000.parquet",
        num_groups=3,
        num_requests=4,
        num_rows=6,
        num_parts=2,
        num_prefill_tokens=20,
    )
    fields: dict[str, Any] = {
        "plan_id": compute_plan_id(spec, "2026-01-31", "model-1", FILES),
        "spec": spec,
        "ds": "2026-01-31",
        "input_version": "parquet:1",
        "tokenizer_fingerprint": "f" * 64,
        "model_version": "commit:abc",
        "max_model_len": 4096,
        "counts": counts,
        "sharing": PlanSharing(
            prefix_lengths=Histogram(edges=(), counts=()),
            share_degrees=Histogram(edges=(), counts=()),
            largest_groups=(),
        ),
        "files": FILES,
        "shards": (shard,),
        **changes,
    }
    return PlanManifest(**fields)


def refused(data: bytes) -> str:
    with pytest.raises(PlanError) as caught:
        PlanManifest.from_bytes(data, source="/lake/out/_batchllm/plan-1")
    assert caught.value.exit_code == ExitCode.INVALID
    message = str(caught.value)
    assert message.startswith("plan /lake/out/_batchllm/plan-1: ")
    return message


# The manifest


def test_a_manifest_survives_being_stored() -> None:
    manifest = make_manifest()
    stored = PlanManifest.from_bytes(manifest.to_bytes(), source="x")
    assert stored == manifest
    assert stored.to_bytes() == manifest.to_bytes()
    assert stored.run_id == f"snippets/2026-01-31/{manifest.plan_id}"


def test_equal_plans_have_equal_bytes() -> None:
    turned = make_manifest(files=dict(reversed(FILES.items())))
    assert turned.to_bytes() == make_manifest().to_bytes()


MANIFEST = make_manifest().to_bytes()


@given(position=st.integers(0, len(MANIFEST) - 1), bit=st.integers(0, 7))
@example(position=0, bit=0)
@example(position=len(MANIFEST) - 1, bit=0)
def test_a_flipped_bit_anywhere_is_noticed(position: int, bit: int) -> None:
    damaged = bytearray(MANIFEST)
    damaged[position] ^= 1 << bit
    refused(bytes(damaged))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"3",
        b'"batchllm-plan"',
        b"{}",
        b'{"kind": "dbt-manifest", "plan_version": 1}',
        b"PAR1\0\0PAR1",
        b"\xff\xfe{}",
        b'{"kind": "batchllm-plan"',
    ],
)
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    message = refused(data)
    assert "isn't a plan" in message or "corrupted" in message


def test_a_manifest_that_was_edited_by_hand_is_refused() -> None:
    body = json.loads(MANIFEST)
    body["counts"]["num_rows"] = 8
    assert "checksum" in refused(json.dumps(body).encode())
    del body["manifest_sha256"]
    assert "checksum" in refused(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda body: body["spec"]["sampling"].update(temperature=-1), "spec.sampling.temperature"),
        (lambda body: body["spec"].update(name="a/b"), "spec.name"),
        (lambda body: body["counts"].update(num_rows=-1), "counts.num_rows"),
    ],
)
def test_a_whole_plan_that_this_release_refuses_is_not_called_corrupted(
    change: Callable[[Any], None], where: str
) -> None:
    body = json.loads(MANIFEST)
    del body["manifest_sha256"]
    change(body)
    message = refused(_dump({**body, "manifest_sha256": _digest(body)}))
    assert f"this release refuses it ({where}: must be " in message
    assert "make the plan again" in message and "corrupted" not in message


def test_a_plan_of_columns_that_differ_by_case_is_read() -> None:
    """Only some formats refuse them, when the job is planned."""
    source = {"uri": "/lake/in", "key": ["id"]}
    spec = make_spec(input=source, output={"uri": "/lake/out", "carry": ["Id", "Error"]})
    assert PlanManifest.from_bytes(make_manifest(spec=spec).to_bytes(), source="x").spec == spec


# Plan ids


def test_the_plan_id_stands_for_job_partition_and_data() -> None:
    spec = make_spec()
    plan_id = compute_plan_id(spec, "2026-01-31", "model-1", FILES)
    assert len(plan_id) == 16
    assert int(plan_id, 16) >= 0
    assert plan_id == compute_plan_id(spec, "2026-01-31", "model-1", dict(reversed(FILES.items())))
    learned = LearnedOutputs(
        ds="2026-01-30",
        plan_id=plan_id,
        buckets=(LengthBucket(min_prompt_tokens=8, num_rows=2, num_output_tokens=9),),
    )
    assert plan_id != compute_plan_id(spec, "2026-01-31", "model-1", FILES, learned)
    tuned = make_spec(engine={**spec.engine.model_dump(), "max_num_seqs": 3})
    assert plan_id == compute_plan_id(tuned, "2026-01-31", "model-1", FILES)
    others = {
        plan_id,
        compute_plan_id(make_spec(name="other"), "2026-01-31", "model-1", FILES),
        compute_plan_id(spec, "2026-02-01", "model-1", FILES),
        compute_plan_id(spec, "2026-01-31", "model-2", FILES),
        compute_plan_id(spec, "2026-01-31", "model-1", {"rows.parquet": FILES["rows.parquet"]}),
        compute_plan_id(
            spec,
            "2026-01-31",
            "model-1",
            {**FILES, "rows.parquet": DataFile(size_bytes=10, sha256="c" * 64)},
        ),
    }
    assert len(others) == 6


# Parts


@given(st.lists(st.integers(1, 12), max_size=12), st.integers(1, 6))
@example([], 3)
@example([1], 1)
@example([6], 3)
@example([2, 7], 3)
def test_part_bounds(sizes: list[int], part_rows: int) -> None:
    group_ids = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
    bounds = part_bounds(group_ids, np.ones_like(group_ids), part_rows)
    assert bounds[0] == 0
    assert bounds[-1] == len(group_ids)
    parts = np.diff(bounds)
    assert np.all(parts > 0)
    assert np.all(parts[:-1] >= part_rows)  # only the last may be smaller than asked for
    assert np.all(parts < 2 * part_rows)
    for bound in bounds[1:-1]:
        if group_ids[bound - 1] == group_ids[bound]:
            assert sizes[group_ids[bound]] > part_rows


def test_part_bounds_do_not_mind_group_ids_with_gaps() -> None:
    """A shard has some of the plan's groups."""
    group_ids = np.array([3, 3, 8, 8, 40])
    assert part_bounds(group_ids, np.ones_like(group_ids), 2) == [0, 2, 4, 5]


@given(
    st.lists(st.lists(st.integers(0, 3 * PART_TOKENS), min_size=1, max_size=5), max_size=6),
    st.integers(1, 4),
)
def test_parts_of_long_prompts_close_early(groups: list[list[int]], part_rows: int) -> None:
    """Whatever `part_rows` says: only a single prompt makes a part much larger than a full one."""
    lengths = np.array([length for group in groups for length in group], dtype=np.int64)
    group_ids = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    bounds = part_bounds(group_ids, lengths, part_rows)
    assert bounds[0] == 0 and bounds[-1] == len(lengths)
    for start, end in pairwise(bounds):
        assert start < end
        assert end - start == 1 or lengths[start:end].sum() <= 2 * PART_TOKENS + lengths[end - 1]


# Shard files


def write(path: Path, sizes: list[int], part_rows: int, start: int = 0) -> tuple[TokenTable, int]:
    """A shard of groups of the given sizes, its prompts taken backwards from the table."""
    num_requests = sum(sizes)
    tokens = TokenTable.from_lists([list(range(idx)) for idx in range(num_requests)])
    everyone = np.arange(num_requests)
    num_rows = 1 + everyone % 3
    rows = np.concatenate([np.arange(idx, idx + 1 + idx % 3) for idx in range(num_requests)])
    prefixes = np.where(np.array(sizes) > 1, np.array(sizes), 0)
    parts = write_shard(
        path,
        Requests(tokens, everyone, tokens.lengths, rows, np.append(0, np.cumsum(num_rows))),
        PrefixGroups(everyone[::-1].copy(), np.cumsum([0, *sizes]), prefixes),
        everyone + 1,
        first_request=start,
        first_group=7,
        part_rows=part_rows,
    )
    return tokens, len(list(parts))


def test_a_shard_is_read_back_part_by_part(tmp_path: Path) -> None:
    path = tmp_path / shard_file(0)
    tokens, num_parts = write(path, [3, 1, 5, 1], part_rows=2, start=100)
    file = pq.ParquetFile(path)
    assert file.schema_arrow == SHARD_SCHEMA
    assert (
        file.num_row_groups
        == num_parts
        == len(part_bounds(np.repeat([0, 1, 2, 3], [3, 1, 5, 1]), np.arange(10), 2)) - 1
    )
    rows = []
    for part_idx in range(num_parts):
        part = file.read_row_group(part_idx)
        assert part.num_rows == file.metadata.row_group(part_idx).num_rows
        rows += part.to_pylist()
    assert [row["request_idx"] for row in rows] == list(range(100, 110))
    assert [row["group_id"] - 7 for row in rows] == [0, 0, 0, 1, 2, 2, 2, 2, 2, 3]
    assert [row["num_prefix_tokens"] for row in rows] == [3, 3, 3, 0, 5, 5, 5, 5, 5, 0]
    assert [row["num_output_tokens"] for row in rows] == list(range(10, 0, -1))
    assert [row["row_idxs"] for row in rows] == [
        list(range(idx, idx + 1 + idx % 3)) for idx in reversed(range(10))
    ]
    assert [row["prompt_token_ids"] for row in rows] == [
        tokens.prompt(9 - idx).tolist() for idx in range(10)
    ]


def test_the_same_shard_has_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, [3, 1, 5], part_rows=2)
    assert describe_file(tmp_path / "a") == describe_file(tmp_path / "b")
    write(tmp_path / "c", [3, 1, 5], part_rows=3)
    assert describe_file(tmp_path / "a") != describe_file(tmp_path / "c")
