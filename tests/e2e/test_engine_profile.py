"""What the engine notes about its device and its steps, and who schedules them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.demo_job import DS, Demo

from batchllm_operator.engine.device_profile import DeviceProfile

FEW_ROWS = {"filter": [{"column": "package", "op": "<", "value": "c"}]}


def run_job(demo: Demo, name: str, **changes: Any) -> tuple[Path, dict[str, Any], str]:
    """Plan and run a small job: the plan's folder, the shard's report, what was printed."""
    spec = demo.write_spec(name, input=FEW_ROWS, **changes)
    plan = demo.run("plan", "--job", str(spec), "--ds", DS)
    result = demo.folder / f"{name}.json"
    arguments = ("run", "--plan", plan["plan_uri"], "--shard", "0", "--result", str(result))
    process = demo.start(*arguments)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    return Path(plan["plan_uri"]), dict(plan), printed


def traces(plan: Path) -> list[pa.Table]:
    return [pq.read_table(path) for path in sorted(plan.glob("runs/shard-00000/*/trace-*.parquet"))]


def test_a_run_leaves_a_trace_of_all_its_steps(demo: Demo) -> None:
    folder, plan, _ = run_job(demo, "traced")
    [trace] = traces(folder)
    columns = trace.to_pydict()
    num_prompt = sum(columns["num_distinct_tokens"]) + sum(columns["num_prefix_tokens"])
    assert num_prompt + sum(columns["num_cached_tokens"]) == plan["num_logical_tokens"]
    assert sum(columns["num_prefix_tokens"]) > 0
    assert sum(columns["num_preempted"]) == 0
    assert columns["num_waiting"][-1] == columns["num_running"][-1] == 0 or (
        columns["num_scheduled"][-1] > 0
    )


def test_vllms_own_scheduler_can_be_asked_for(demo: Demo) -> None:
    folder, _, _ = run_job(demo, "stock", engine={"scheduler": "stock"})
    assert traces(folder) == []


def test_the_users_own_settings_of_the_scheduler_win(demo: Demo) -> None:
    chosen = {"additional_config": {"batchllm": {"chunk_size": 100, "pace": False}}}
    folder, _, _ = run_job(demo, "chosen", engine={"extra_args": chosen})
    [trace] = traces(folder)
    columns = trace.to_pydict()
    names = ("num_decode_tokens", "num_distinct_tokens", "num_prefix_tokens")
    assert max(sum(kinds) for kinds in zip(*(columns[name] for name in names), strict=True)) == 100


@pytest.fixture(scope="module")
def profiled(demo: Demo) -> tuple[Path, str]:
    changes = {"profile": True, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 1 << 24}
    folder, _, printed = run_job(demo, "profiled", engine=changes)
    return folder, printed


def test_the_device_is_measured_once(demo: Demo, profiled: tuple[Path, str]) -> None:
    folder, printed = profiled
    [stored] = (folder.parents[2] / "profiles").glob("*.json")
    profile = DeviceProfile.model_validate_json(stored.read_bytes())
    assert [tokens for tokens, _ in profile.steps] == [64, 128, 256]
    assert "chunk size" in printed
    assert str(demo.model) in profile.subject["arguments"]
    written = stored.stat().st_mtime_ns
    spec = demo.folder / "profiled.yaml"
    spec.write_text(spec.read_text().replace("Query:", "Question:"))  # another plan
    plan = demo.run("plan", "--job", str(spec), "--ds", DS)
    assert Path(plan["plan_uri"]) != folder
    demo.run("run", "--plan", plan["plan_uri"], "--shard", "0")
    assert stored.stat().st_mtime_ns == written


def test_steps_keep_to_the_profiles_chunk_size(profiled: tuple[Path, str]) -> None:
    folder, _ = profiled
    [stored] = (folder.parents[2] / "profiles").glob("*.json")
    chunk_size = DeviceProfile.model_validate_json(stored.read_bytes()).chunk_size
    [trace] = traces(folder)
    columns = trace.to_pydict()
    names = ("num_decode_tokens", "num_distinct_tokens", "num_prefix_tokens")
    sums = [sum(kinds) for kinds in zip(*(columns[name] for name in names), strict=True)]
    assert 0 < max(sums) <= chunk_size
    assert columns["step"][0] == 1  # of the job, not of the profile
