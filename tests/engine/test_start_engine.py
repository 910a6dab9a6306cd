"""Starting an engine, and what a user reads when that fails. vLLM itself: tests/e2e."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
from support.fake_job import fake_spec

from batchllm_operator.engine import EngineJob, EngineOutput, EngineRequest, start_engine
from batchllm_operator.engine.arguments import INVARIANCE
from batchllm_operator.errors import MissingLibraryError, SpecError


def test_the_spec_chooses_the_engine() -> None:
    engine = start_engine(fake_spec("/lake"), EngineJob(100))
    outputs = list(engine.stream(iter([EngineRequest(4, [1, 2], 0, 0)])))
    assert [output.request_idx for output in outputs] == [4]


def test_without_vllm_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "batchllm_operator.engine.vllm.engine", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingLibraryError, match=r"library vllm, .* extra `gpu` or `cpu`: pip "):
        start_engine(fake_spec("/lake", engine={"backend": "vllm"}), EngineJob(100))


@pytest.mark.parametrize("asked", [True, False])
def test_batch_invariance_is_asked_of_vllm_before_its_import(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    found: list[str] = []
    engine = SimpleNamespace(VLLMEngine=lambda *_: found.append(os.environ[INVARIANCE]))
    monkeypatch.setitem(sys.modules, "batchllm_operator.engine.vllm.engine", engine)
    spec = fake_spec("/lake", engine={"backend": "vllm", "batch_invariant": asked})
    start_engine(spec, EngineJob(100))
    assert found == ["1" if asked else "0"]


@pytest.mark.parametrize(
    ("is_cuda", "known", "message"),
    [
        (False, True, "for NVIDIA GPUs, and this platform is tpu"),
        (True, False, "this vLLM doesn't have it"),
        (True, True, None),
    ],
)
def test_batch_invariance_without_effect_is_refused(
    is_cuda: bool, known: bool, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = pytest.importorskip("batchllm_operator.engine.vllm.arguments")
    platform = SimpleNamespace(is_cuda=lambda: is_cuda, is_cpu=lambda: False, device_name="tpu")
    monkeypatch.setattr(arguments, "current_platform", platform)
    variables = {INVARIANCE: None} if known else {}
    monkeypatch.setattr(arguments, "envs", SimpleNamespace(environment_variables=variables))
    spec = fake_spec("/lake", engine={"backend": "vllm", "batch_invariant": True})
    if message is None:
        arguments.engine_args(spec, 100)
        return
    with pytest.raises(SpecError, match=message):
        arguments.engine_args(spec, 100)


def test_a_failed_output_is_one_line() -> None:
    output = EngineOutput.failed(EngineRequest(0, [1, 2, 3], 0, 0), "first\n  second")
    assert str(output.error) == "engine_error: first second"
    assert (output.text, output.num_prompt_tokens, output.num_output_tokens) == (None, 3, 0)
