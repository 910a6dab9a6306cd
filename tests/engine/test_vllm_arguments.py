"""What of a spec reaches vLLM on each platform, and what is made of its answers at the start."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.adapters import write_adapter
from support.fake_job import fake_spec

from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec

start = pytest.importorskip("batchllm_operator.engine.vllm.start")
MODULES = {"model.layers.0.self_attn.q_proj": (8, 8)}


def make_spec(**engine: Any) -> JobSpec:
    return fake_spec("/lake", engine={"backend": "vllm", **engine})


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The platform that vLLM is on: as a GPU's, unless changed."""
    gpu = SimpleNamespace(
        is_cpu=lambda: False, is_cuda_alike=lambda: True, is_cuda=lambda: True, device_name="tpu"
    )
    monkeypatch.setattr(start, "current_platform", gpu)
    return gpu


# Attention


CUSTOM = {"attention_backend": "CUSTOM"}
GRAPHS = {"additional_config": {"batchllm_attention": {"decode_graphs": True}}}


@pytest.mark.parametrize(
    ("attention", "is_cpu", "extra_args", "expected"),
    [
        ("batchllm", False, {}, CUSTOM),
        ("batchllm", True, {}, {}),  # there it replaces vLLM's only backend
        ("stock", False, {}, {}),
        ("stock", False, {"attention_backend": "FLASHINFER"}, {}),
        ("batchllm", False, GRAPHS, {**CUSTOM, "max_cudagraph_capture_size": 1024}),
        ("batchllm", False, {**GRAPHS, "cudagraph_capture_sizes": [1, 8]}, CUSTOM),
        ("batchllm", False, {**GRAPHS, "compilation_config": {"cudagraph_mode": "FULL"}}, CUSTOM),
    ],
)
def test_attention_is_chosen_by_arguments(
    attention: str,
    is_cpu: bool,
    extra_args: dict[str, Any],
    expected: dict[str, Any],
    platform: SimpleNamespace,
) -> None:
    platform.is_cpu = lambda: is_cpu
    spec = make_spec(attention=attention, extra_args=extra_args)
    assert start.attention_args(spec) == expected


def test_other_platforms_are_refused(platform: SimpleNamespace) -> None:
    platform.is_cuda_alike = lambda: False
    with pytest.raises(SpecError, match="CUDA, ROCm and CPU"):
        start.attention_args(make_spec(attention="batchllm"))


class Engine:
    """Workers that report what they are told to."""

    def __init__(self, *reports: tuple[int, list[str]], backend: str | None = None) -> None:
        from batchllm_operator.vllm_plugin.attention.backend import AttentionReport

        self._reports = [AttentionReport(*report, "Triton on sm90") for report in reports]
        self.asked: list[str] = []
        chosen = SimpleNamespace(name=backend) if backend else None
        self.vllm_config = SimpleNamespace(attention_config=SimpleNamespace(backend=chosen))

    def collective_rpc(self, method: Any) -> list[Any]:
        self.asked.append(method.__name__)
        return self._reports


def test_the_line_says_what_runs_and_why() -> None:
    ours, stock = make_spec(attention="batchllm"), make_spec()
    engine = Engine((2, []), (2, []))
    assert start.start_attention(ours, engine) == (
        "attention: batchllm (engine.attention), Triton on sm90"
    )
    assert engine.asked == ["report_attention", "warm_up_attention"]
    assert start.start_attention(stock, Engine()) == (
        "attention: vLLM's own (engine.attention: stock, the default)"
    )
    assert "own, FLASHINFER (engine.extra_args)" in start.start_attention(
        stock, Engine(backend="FLASHINFER")
    )


@pytest.mark.parametrize(
    ("reports", "named"),
    [
        ([(2, []), (1, ["model.layers.1: CPU_MLA"])], "it has model.layers.1: CPU_MLA and 0 more"),
        ([(2, []), (0, [])], "it has none"),
    ],
)
def test_an_engine_that_runs_something_else_is_refused(
    reports: list[tuple[int, list[str]]], named: str
) -> None:
    with pytest.raises(SpecError, match=named):
        start.start_attention(make_spec(attention="batchllm"), Engine(*reports))


def test_a_profile_is_of_one_attention_and_its_settings() -> None:
    from batchllm_operator.engine.vllm.profiling import profile_subject

    given = [({}, "stock"), ({}, "batchllm"), (GRAPHS, "batchllm")]
    subjects = [profile_subject(*each) for each in given]
    assert len({subject["attention"] for subject in subjects}) == 3
    assert profile_subject(GRAPHS, "stock") == subjects[0]


def test_batch_invariance_is_for_nvidia_gpus(platform: SimpleNamespace) -> None:
    start.engine_args(make_spec(batch_invariant=True), 100)
    platform.is_cuda = lambda: False
    with pytest.raises(SpecError, match="for NVIDIA GPUs, and this platform is tpu"):
        start.engine_args(make_spec(batch_invariant=True), 100)


# Adapters


def adapting(folder: Path, ranks: dict[str, int], **extra_args: int) -> JobSpec:
    for name, rank in ranks.items():
        write_adapter(folder / name, MODULES, rank=rank)
    adapters = {name: str(folder / name) for name in ranks}
    return fake_spec(
        folder,
        model={"path": "m", "adapters": adapters, "adapter_column": "c"},
        engine={"backend": "vllm", "extra_args": extra_args},
    )


def test_settings_on_a_cpu_leave_the_last_slot_empty(tmp_path: Path) -> None:
    spec = adapting(tmp_path, {"a": 4, "b": 9, "c": 8})
    wanted = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16}
    assert start.adapter_args(spec) == wanted
    assert start.adapter_args(fake_spec(tmp_path)) == {}
    with pytest.raises(SpecError, match="max_loras must be at least 4 on a CPU"):
        start.adapter_args(adapting(tmp_path, {"a": 4, "b": 9, "c": 8}, max_loras=3))


def test_settings_on_a_gpu(tmp_path: Path, platform: SimpleNamespace) -> None:
    three, one = adapting(tmp_path, {"a": 8, "b": 1, "c": 8}), adapting(tmp_path, {"d": 1})
    found = [start.adapter_args(spec) for spec in (three, one)]
    assert [(args["max_loras"], args["max_lora_rank"]) for args in found] == [(2, 8), (1, 1)]


def test_a_rank_that_vllm_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"adapters\.b: has rank 1000, and vLLM takes at most 512"):
        start.adapter_args(adapting(tmp_path, {"a": 8, "b": 1000}))


def test_each_is_loaded_once_and_refused_by_name(tmp_path: Path) -> None:
    model = adapting(tmp_path, {"b": 8, "a": 8}).model
    loaded: list[tuple[str, int, str]] = []

    def add_lora(request: start.LoRARequest) -> None:  # type: ignore[name-defined]
        loaded.append((request.lora_name, request.lora_int_id, request.lora_path))
        if len(loaded) == 4:
            raise ValueError("vLLM does not yet support DoRA.")

    engine = SimpleNamespace(add_lora=add_lora)
    requests = start.load_adapters(model, engine)
    assert loaded == [("a", 1, str(tmp_path / "a")), ("b", 2, str(tmp_path / "b"))]
    assert [each.lora_int_id for each in requests.values()] == [1, 2]
    with pytest.raises(SpecError, match=r"adapters\.b: vLLM refuses it: .* DoRA"):
        start.load_adapters(model, engine)
