"""The entry point changes nothing unless it is asked to, and an engine's choice ends with it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm.platforms
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from batchllm_operator.vllm_plugin.register import BACKEND, VARIABLE, attention_chosen, register

ON_CPU, ON_GPU = AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CUSTOM
THEIRS = "somebody.else.Backend"


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's register and the environment as they are in a new process, before and after."""
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    for slot in (ON_CPU, ON_GPU):
        slot.clear_override()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True)
    monkeypatch.setattr(vllm.platforms, "current_platform", platform)


def test_on_a_cpu_nothing_happens_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "stock", "1"):
        monkeypatch.setenv(VARIABLE, value)
        register()
        assert not ON_CPU.is_overridden()
    monkeypatch.setenv(VARIABLE, "batchllm")
    register()
    register()  # vLLM may call it again
    assert ON_CPU.get_path() == BACKEND
    assert not ON_GPU.is_overridden()


def test_on_a_gpu_ours_can_be_chosen_as_custom(gpu: None) -> None:
    register()
    assert ON_GPU.get_path() == BACKEND
    assert not ON_CPU.is_overridden()


def test_another_plugins_custom_stays_unless_ours_is_asked_for(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_backend(ON_GPU, THEIRS)
    register()
    assert ON_GPU.get_path() == THEIRS
    monkeypatch.setenv(VARIABLE, "batchllm")
    register()
    assert ON_GPU.get_path() == BACKEND


@pytest.mark.parametrize("before", [None, THEIRS])
def test_a_choice_ends_with_the_start_of_the_engine(before: str | None) -> None:
    if before is not None:
        register_backend(ON_CPU, before)
    with pytest.raises(KeyError), attention_chosen("batchllm"):
        assert ON_CPU.get_path() == BACKEND
        assert os.environ[VARIABLE] == "batchllm"
        raise KeyError
    assert VARIABLE not in os.environ
    assert ON_CPU.is_overridden() == (before is not None)
    assert ON_CPU.get_path() == (before or ON_CPU.value)


def test_stock_is_stock_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "batchllm")
    register()
    with attention_chosen("stock"):
        assert not ON_CPU.is_overridden()
        register()
        assert not ON_CPU.is_overridden()
    assert os.environ[VARIABLE] == "batchllm"
    assert ON_CPU.get_path() == BACKEND


CHOSEN = f"""
import os, sys
from vllm import plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum
plugins.load_general_plugins()
print(AttentionBackendEnum.CPU_ATTN.get_path())
os.environ["{VARIABLE}"] = "batchllm"
plugins.plugins_loaded = False
plugins.load_general_plugins()
print(AttentionBackendEnum.CPU_ATTN.get_path())
print("batchllm_operator.vllm_plugin.register" in sys.modules, "batchllm_kernels" in sys.modules)
"""


def test_vllm_loads_the_entry_point(tmp_path: Path) -> None:
    """Which changes nothing until it is asked to."""
    folder = tmp_path / "entry-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: entry\nVersion: 0\n")
    line = "other-name = batchllm_operator.vllm_plugin.register:register"
    (folder / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{line}\n")
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path[1:]])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHOSEN],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines()[-3:] == [str(ON_CPU.value), BACKEND, "True False"]


def test_loading_the_entry_point_is_cheap() -> None:
    code = (
        "import sys, batchllm_operator.vllm_plugin.register;"
        "print(sorted({'torch', 'vllm', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"
