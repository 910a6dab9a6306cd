"""Jobs with LoRA adapters: by row or for all rows, kept apart from each other in the plan."""

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file
from support.adapters import write_adapter
from support.answers_job import asking, published, run_and_commit
from support.fake_job import DS, document_rows, expected_prompt, write_table

from batchllm_operator.answers.fakes import fake_text
from batchllm_operator.errors import ModelError, PlanError, SpecError
from batchllm_operator.inspect.simulations import _read_workload
from batchllm_operator.plan.advise import advise
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.shard_files import ADAPTER_FIELD, SHARD_SCHEMA
from batchllm_operator.stored_plan.stored_plan import StoredPlan

NEXT = "2026-02-01"
MODULES = {"model.layers.0.self_attn.q_proj": (8, 8)}
NAMES = ("french", "german", "polish")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three adapters."""
    for seed, name in enumerate(NAMES):
        write_adapter(tmp_path / name, MODULES, seed=seed)
    return tmp_path


def adapting(folder: Path, *, names: tuple[str, ...] = NAMES, **changes: Any) -> JobSpec:
    """A job whose column `language` names the adapter."""
    adapters = {name: str(folder / name) for name in names}
    model = {"path": "no-model", "adapters": adapters, "adapter_column": "language"}
    return asking(folder, **{"model": model, **changes})


def rows_by(*adapters: str | None) -> list[dict[str, Any]]:
    """The same documents for each adapter, with keys of their own."""
    return [
        {**row, "row_key": f"{row['row_key']}-{number}", "language": adapter}
        for row in document_rows(3, 2)
        for number, adapter in enumerate(adapters)
    ]


def text_of(row: dict[str, Any]) -> str:
    return fake_text(list(expected_prompt(row).encode()), adapter=row["language"] or None)


def shard_tables(plan: StoredPlan) -> list[pa.Table]:
    tables = []
    for shard_idx in range(len(plan.manifest.shards)):
        with plan.open_shard(shard_idx) as file:
            tables.append(file.read())
    return tables


def test_each_row_is_answered_by_its_adapter(folder: Path) -> None:
    rows = rows_by("german", None, "french", "", "polish")
    rows[5] = {**rows[7], "row_key": "a copy"}
    write_table(folder / "documents", rows)
    spec = adapting(folder)
    plan = run_and_commit(spec)
    for found, row in zip(published(spec), rows, strict=True):
        assert found["generated_text"] == text_of(row)
        assert found["num_prompt_tokens"] == len(expected_prompt(row))
    # Null and empty are both the model itself: those are duplicates, as is the copy.
    assert plan.manifest.counts.num_duplicate_rows == 6 + 1


def test_prompts_are_shared_within_an_adapter_only(folder: Path) -> None:
    write_table(folder / "documents", rows_by("german", None, "french"))
    plan = plan_job(adapting(folder, planner={"num_shards": 2, "part_rows": 5}), DS)
    write_table(folder / "documents", rows_by(None))
    alone = plan_job(asking(folder, planner={"num_shards": 1}), DS).manifest.counts
    counts = plan.manifest.counts
    assert counts.num_optimal_tokens == 3 * alone.num_optimal_tokens
    assert counts.num_logical_tokens == 3 * alone.num_logical_tokens
    for table in shard_tables(plan):
        assert table.schema.equals(SHARD_SCHEMA.append(ADAPTER_FIELD))
        adapters = table["adapter"].to_pylist()
        assert len(list(groupby(adapters))) == len(set(adapters))  # one after the other
        groups = set(zip(table["group_id"].to_pylist(), adapters, strict=True))
        assert len(groups) == len({group for group, _ in groups})
        assert max(max(ids) for ids in table["prompt_token_ids"].to_pylist()) < 256


def test_an_adapter_for_all_rows(folder: Path) -> None:
    rows = rows_by("german")
    write_table(folder / "documents", rows)
    model = {"path": "no-model", "adapters": {"german": str(folder / "french")}}
    spec = asking(folder, model={**model, "adapter": "german"})
    run_and_commit(spec)
    assert [row["generated_text"] for row in published(spec)] == [text_of(row) for row in rows]


def test_an_unknown_name_is_a_row_error(folder: Path) -> None:
    rows = rows_by("german", "dutch\n")
    write_table(folder / "documents", rows)
    spec = adapting(folder, max_failed_fraction=0.5)
    plan = run_and_commit(spec)
    assert plan.manifest.counts.num_rejected_rows == 6
    for found, row in zip(published(spec), rows, strict=True):
        if row["language"] == "german":
            assert found["generated_text"] == text_of(row)
        else:
            message = r"model.adapters has no 'dutch\n'"
            assert found["error"] == {"kind": "unknown_adapter", "message": message}


def test_a_column_of_categories_and_one_of_numbers(folder: Path) -> None:
    rows = rows_by("german", None)
    table = pa.Table.from_pylist(rows)
    partition = folder / "documents" / f"ds={DS}"
    partition.mkdir(parents=True)
    position = table.schema.get_field_index("language")
    categories = table.set_column(position, "language", table["language"].dictionary_encode())
    pq.write_table(categories, partition / "a.parquet")
    spec = adapting(folder)
    run_and_commit(spec)
    assert [row["generated_text"] for row in published(spec)] == [text_of(row) for row in rows]
    numbers = table.set_column(position, "language", pa.array(range(len(rows))))
    pq.write_table(numbers, partition / "a.parquet")
    with pytest.raises(SpecError, match=r"adapter_column: column 'language' .* holds int64"):
        plan_job(spec, DS)
    with pytest.raises(SpecError, match=r"adapter_column: table .* has no column 'language'"):
        write_table(folder / "documents", document_rows(1, 1))
        plan_job(spec, DS)


def test_reuse_knows_the_content_of_adapters(folder: Path) -> None:
    rows = rows_by("german", None)
    write_table(folder / "documents", rows)
    spec = adapting(folder, reuse_outputs=True)
    run_and_commit(spec)
    later = [{**row, "language": "french"} if row["language"] else row for row in rows]
    write_table(folder / "documents", later, NEXT)
    assert plan_job(spec, NEXT).manifest.counts.num_reused_rows == 6  # those without an adapter
    write_table(folder / "documents", rows, NEXT)
    plan = run_and_commit(spec, NEXT)
    assert plan.manifest.counts.num_reused_rows == 12
    for found, row in zip(published(spec, NEXT), rows, strict=True):
        assert found["generated_text"] == text_of(row)
    write_adapter(folder / "german", MODULES, seed=7)
    trained = plan_job(spec, "2026-01-31")
    assert trained.manifest.counts.num_reused_rows == 0
    assert trained.manifest.plan_id != plan.manifest.plan_id


def test_a_run_refuses_an_adapter_that_has_changed(folder: Path) -> None:
    write_table(folder / "documents", rows_by("german"))
    plan = plan_job(adapting(folder), DS)
    write_adapter(folder / "polish", MODULES, seed=9)
    with pytest.raises(PlanError, match=r"adapters\.polish isn't the one that the plan was made"):
        run_worker(plan)


def test_advice_and_simulation_keep_adapters_apart(folder: Path) -> None:
    rows = rows_by("german", None, "french", "unknown")
    write_table(folder / "documents", rows)
    mixed, plain = advise(adapting(folder), DS), advise(asking(folder), DS)
    assert mixed.alternatives[0].saving_ratio < plain.alternatives[0].saving_ratio
    spec = adapting(folder, planner={"num_shards": 1}, max_failed_fraction=0.5)
    plan = plan_job(spec, DS)
    workload = _read_workload(plan, 0)
    [table] = shard_tables(plan)
    firsts = workload.tokens.token_ids[workload.tokens.offsets[:-1]]
    assert len(set(firsts.tolist())) == len(set(table["adapter"].to_pylist())) == 3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"adapter": "a"}, "which are missing"),
        ({"adapter_column": "language"}, "which are missing"),
        ({"adapters": {"a": "/a"}}, "choose one as adapter, or by row"),
        ({"adapters": {"a": "/a"}, "adapter": "b"}, "isn't the name of one of adapters"),
        ({"adapters": {"a": "/a"}, "adapter": "a", "adapter_column": "c"}, "give one of them"),
        ({"adapters": {"a": "s3://a"}, "adapter": "a"}, "isn't a place of models"),
        ({"adapters": {"a": ""}, "adapter": "a"}, "adapters.a: must not be empty"),
    ],
)
def test_what_does_not_fit_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        asking("/lake", model={"path": "no-model", **model})


def test_replicas_compute_no_prefixes_together() -> None:
    changes = {"engine": {"replicas": 2}, "planner": {"runahead": "on", "num_shards": 1}}
    model = {"path": "no-model", "adapters": {"a": "/a"}, "adapter": "a"}
    with pytest.raises(SpecError, match="a chain computes prefixes without an adapter"):
        asking("/lake", model=model, **changes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "isn't a LoRA adapter: its peft_type is 'IA3'"),
        ({"r": 0}, "must have ranks"),
        ({"rank_pattern": {"q_proj": "8"}}, "must have ranks"),
        (None, "adapter_config.json can't be read"),
    ],
)
def test_what_is_no_adapter_is_refused_by_name(
    folder: Path, config: dict[str, Any] | None, message: str
) -> None:
    write_table(folder / "documents", rows_by("german"))
    if config is None:
        (folder / "german" / "adapter_config.json").write_text("{")
    else:
        write_adapter(folder / "german", MODULES, **config)
    with pytest.raises(ModelError, match=rf"model\.adapters\.german: .*{message}"):
        plan_job(adapting(folder), DS)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"model.layers.0.self_attn.q_proj": (16, 8)}, "8 inputs in the model, and 16 in the"),
        ({"model.layers.1.self_attn.q_proj": (8, 4)}, "8 outputs in the model, and 4 in the"),
        ({"model.layers.2.self_attn.q_proj": (8, 8)}, "the model has no model.layers.2.self_att"),
        ({"model.layers.1.self_attn.q_proj": (8, 8), "other": (1, 1)}, None),
    ],
)
def test_an_adapter_of_another_model_is_refused(
    folder: Path, modules: dict[str, tuple[int, int]], message: str | None
) -> None:
    write_table(folder / "documents", rows_by("german"))
    layers = {
        f"model.layers.{layer}.self_attn.q_proj.weight": np.zeros((8, 8), "<f4") for layer in (0, 1)
    }
    (folder / "model").mkdir()
    save_file(layers, folder / "model" / "model.safetensors")
    write_adapter(folder / "german", modules, base_model_name_or_path="them/other")
    spec = adapting(folder)
    spec = spec.model_copy(
        update={"model": spec.model.model_copy(update={"path": str(folder / "model")})}
    )
    if message is None:
        assert plan_job(spec, DS).manifest.counts.num_rejected_rows == 0
    else:
        with pytest.raises(ModelError, match=rf"trained on them/other\): .*{message}"):
            plan_job(spec, DS)
