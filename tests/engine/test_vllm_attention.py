"""What of `engine.attention` reaches vLLM on each platform, and what is made of its answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_job import fake_spec

from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec

vllm_attention = pytest.importorskip("batchllm_operator.engine.vllm.attention")
KNOWN: dict[str, object] = {"attention_backend": None}


def make_spec(**engine: Any) -> JobSpec:
    return fake_spec("/lake", engine={"backend": "vllm", **engine})


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The platform that vLLM is on: as a GPU's, unless changed."""
    given = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True)
    monkeypatch.setattr(vllm_attention, "current_platform", given)
    return given


def test_on_a_gpu_ours_is_vllms_custom_backend(platform: SimpleNamespace) -> None:
    spec = make_spec(attention="batchllm")
    assert vllm_attention.attention_args(spec, KNOWN) == {"attention_backend": "CUSTOM"}
    with pytest.raises(SpecError, match="has no argument attention_backend"):
        vllm_attention.attention_args(spec, {})


@pytest.mark.parametrize(
    ("attention", "given", "size"),
    [
        ({"decode_graphs": True}, {}, 1024),
        ({}, {}, None),
        ({"decode_graphs": True}, {"cudagraph_capture_sizes": [1, 8]}, None),
        ({"decode_graphs": True}, {"compilation_config": {"cudagraph_mode": "FULL"}}, None),
    ],
)
def test_graphs_of_decode_steps_go_up_to_what_runs_at_once(
    attention: dict[str, Any],
    given: dict[str, Any],
    size: int | None,
    platform: SimpleNamespace,
) -> None:
    extra_args = {"additional_config": {"batchllm_attention": attention}, **given}
    spec = make_spec(attention="batchllm", extra_args=extra_args)
    args = vllm_attention.attention_args(spec, KNOWN)
    assert args.get("max_cudagraph_capture_size") == size


def test_on_a_cpu_it_takes_no_argument(platform: SimpleNamespace) -> None:
    platform.is_cpu = lambda: True
    assert vllm_attention.attention_args(make_spec(attention="batchllm"), KNOWN) == {}


def test_stock_leaves_the_choice_to_vllm_and_its_user(platform: SimpleNamespace) -> None:
    assert vllm_attention.attention_args(make_spec(), KNOWN) == {}
    chosen = make_spec(extra_args={"attention_backend": "FLASHINFER"})
    assert vllm_attention.attention_args(chosen, KNOWN) == {}


def test_other_platforms_are_refused(platform: SimpleNamespace) -> None:
    platform.is_cuda_alike = lambda: False
    with pytest.raises(SpecError, match="CUDA, ROCm and CPU"):
        vllm_attention.attention_args(make_spec(attention="batchllm"), KNOWN)


class Engine:
    """Workers that report what they are told to."""

    def __init__(self, *reports: tuple[int, list[str]], backend: str | None = None) -> None:
        from batchllm_operator.vllm_plugin.attention.report import AttentionReport

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
    assert vllm_attention.start_attention(ours, engine) == (
        "attention: batchllm (engine.attention), Triton on sm90"
    )
    assert engine.asked == ["report_attention", "warm_up_attention"]
    assert vllm_attention.start_attention(stock, Engine()) == (
        "attention: vLLM's own (engine.attention: stock, the default)"
    )
    assert "own, FLASHINFER (engine.extra_args)" in vllm_attention.start_attention(
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
        vllm_attention.start_attention(make_spec(attention="batchllm"), Engine(*reports))


def test_a_profile_is_of_one_attention_and_its_settings() -> None:
    from batchllm_operator.engine.vllm.profiling import profile_subject

    graphs = {"additional_config": {"batchllm_attention": {"decode_graphs": True}}}
    given = [({}, "stock"), ({}, "batchllm"), (graphs, "batchllm")]
    subjects = [profile_subject(*each) for each in given]
    assert len({subject["attention"] for subject in subjects}) == 3
    assert profile_subject(graphs, "stock") == subjects[0]
