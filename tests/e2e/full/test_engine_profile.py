"""What the engine notes about its device and its steps, and who schedules them."""

from pathlib import Path
from typing import Any

import pytest
from support.demo_job import DS, Demo, traces

from batchllm_operator.engine.device_profile import DeviceProfile

FEW_ROWS = {"filter": [{"column": "package", "op": "<", "value": "c"}]}


def run_job(demo: Demo, name: str, **changes: Any) -> tuple[Path, str]:
    """Plan and run a small job: the plan's folder, what was printed."""
    spec = demo.write_spec(name, input=FEW_ROWS, **changes)
    plan = demo.run("plan", "--job", str(spec), "--ds", DS)
    code, printed = demo.start(
        "run", "--plan", plan["plan_uri"], "--worker", "0", "--num-workers", "1"
    ).end()
    assert code == 0, printed
    return Path(plan["plan_uri"]), printed


def test_vllms_own_scheduler_can_be_asked_for(demo: Demo) -> None:
    folder, _ = run_job(demo, "stock", engine={"scheduler": "stock"})
    assert traces(folder) == []


def test_the_users_own_settings_of_the_scheduler_win(demo: Demo) -> None:
    chosen = {"additional_config": {"batchllm": {"chunk_size": 100, "pace": False}}}
    folder, _ = run_job(demo, "chosen", engine={"extra_args": chosen})
    [trace] = traces(folder)
    columns = trace.to_pydict()
    names = ("num_decode_tokens", "num_distinct_tokens", "num_prefix_tokens")
    assert max(sum(kinds) for kinds in zip(*(columns[name] for name in names), strict=True)) == 100


@pytest.fixture(scope="module")
def profiled(demo: Demo) -> tuple[Path, str]:
    changes = {"profile": True, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 1 << 24}
    folder, printed = run_job(demo, "profiled", engine=changes)
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
    demo.run("run", "--plan", plan["plan_uri"], "--worker", "0", "--num-workers", "1")
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
