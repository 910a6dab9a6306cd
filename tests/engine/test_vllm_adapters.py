"""vLLM's settings for adapters, and its refusals, without a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.adapters import write_adapter
from support.fake_job import fake_spec

from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec

vllm_adapters = pytest.importorskip("batchllm_operator.engine.vllm.adapters")
MODULES = {"model.layers.0.self_attn.q_proj": (8, 8)}


def adapting(folder: Path, ranks: dict[str, int], **extra_args: int) -> JobSpec:
    for name, rank in ranks.items():
        write_adapter(folder / name, MODULES, rank=rank)
    adapters = {name: str(folder / name) for name in ranks}
    return fake_spec(
        folder,
        model={"path": "m", "adapters": adapters, "adapter_column": "c"},
        engine={"backend": "vllm", "extra_args": extra_args},
    )


def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr(vllm_adapters, "current_platform", platform)


def test_settings_on_a_cpu_leave_the_last_slot_empty(tmp_path: Path) -> None:
    spec = adapting(tmp_path, {"a": 4, "b": 9, "c": 8})
    wanted = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16}
    assert vllm_adapters.adapter_args(spec) == wanted
    assert vllm_adapters.adapter_args(fake_spec(tmp_path)) == {}
    with pytest.raises(SpecError, match="max_loras must be at least 4 on a CPU"):
        vllm_adapters.adapter_args(adapting(tmp_path, {"a": 4, "b": 9, "c": 8}, max_loras=3))


def test_settings_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)
    three, one = adapting(tmp_path, {"a": 8, "b": 1, "c": 8}), adapting(tmp_path, {"d": 1})
    found = [vllm_adapters.adapter_args(spec) for spec in (three, one)]
    assert [(args["max_loras"], args["max_lora_rank"]) for args in found] == [(2, 8), (1, 1)]


def test_a_rank_that_vllm_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"adapters\.b: has rank 1000, and vLLM takes at most 512"):
        vllm_adapters.adapter_args(adapting(tmp_path, {"a": 8, "b": 1000}))


def test_each_is_loaded_once_and_refused_by_name(tmp_path: Path) -> None:
    model = adapting(tmp_path, {"b": 8, "a": 8}).model
    loaded: list[tuple[str, int, str]] = []

    def add_lora(request: vllm_adapters.LoRARequest) -> None:  # type: ignore[name-defined]
        loaded.append((request.lora_name, request.lora_int_id, request.lora_path))
        if len(loaded) == 4:
            raise ValueError("vLLM does not yet support DoRA.")

    engine = SimpleNamespace(add_lora=add_lora)
    requests = vllm_adapters.load_adapters(model, engine)
    assert loaded == [("a", 1, str(tmp_path / "a")), ("b", 2, str(tmp_path / "b"))]
    assert [each.lora_int_id for each in requests.values()] == [1, 2]
    with pytest.raises(SpecError, match=r"adapters\.b: vLLM refuses it: .* DoRA"):
        vllm_adapters.load_adapters(model, engine)
