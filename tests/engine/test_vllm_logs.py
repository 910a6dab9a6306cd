"""What of vLLM's log a user sees."""

import logging
import os
import sys
import warnings

import pytest

from batchllm_operator.engine.vllm import logs as vllm_logs

SEED = "The global random seed is set to %d. Since VLLM_ENABLE_V1_MULTIPROCESSING is set to False"


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """One that vLLM warns by in every run, without filters; the environment chooses nothing."""
    for name in (vllm_logs.LEVEL, vllm_logs._OURS, vllm_logs._STREAM):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    for name in (*vllm_logs._EVERY_RUN, *vllm_logs._ON_CPU):
        monkeypatch.setattr(logging.getLogger(f"vllm.{name}"), "filters", [])
    return logging.getLogger("vllm.engine.arg_utils")


def passes(logger: logging.Logger, level: int, text: str) -> bool:
    return bool(logger.filter(logger.makeRecord(logger.name, level, "", 0, text, (), None)))


def test_lines_of_every_run_are_left_out_and_no_others(logger: logging.Logger) -> None:
    vllm_logs.configure_logs()
    assert not passes(logger, logging.WARNING, SEED)
    assert passes(logger, logging.ERROR, SEED)
    assert passes(logger, logging.WARNING, "This model does not officially support it")


@pytest.mark.parametrize("is_on_cpu", [True, False])
def test_on_a_gpu_vllm_says_what_follows_from_a_users_settings(
    is_on_cpu: bool, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_logs, "runs_on_cpu", lambda: is_on_cpu)
    vllm_logs.configure_logs()
    eager = "Enforce eager set, disabling torch.compile and CUDAGraphs."
    assert passes(logging.getLogger("vllm.config.vllm"), logging.WARNING, eager) is not is_on_cpu
    assert not passes(logger, logging.WARNING, SEED)


def test_a_process_that_ours_starts_filters_lines_too(logger: logging.Logger) -> None:
    vllm_logs.configure_logs()
    logger.filters.clear()  # the next process inherits the environment alone
    vllm_logs.configure_logs()
    assert not passes(logger, logging.WARNING, SEED)


@pytest.mark.parametrize("level", ["WARNING", "DEBUG"])
def test_a_level_that_the_user_chose_shows_all(
    level: str, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
    vllm_logs.configure_logs()
    assert passes(logger, logging.WARNING, SEED)
    assert vllm_logs._OURS not in os.environ


@pytest.mark.parametrize("options", [[], ["error"]])
def test_warnings_for_developers_of_vllm_are_left_out_unless_enabled(
    options: list[str], logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "warnoptions", options)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        vllm_logs.configure_logs()
        for module in ("vllm.triton_utils.dispatcher", "mine"):
            warnings.warn_explicit("is deprecated", FutureWarning, "file", 1, module)
    assert len(shown) == (2 if options else 1)


def test_a_grammar_that_fails_for_each_row_logs_no_traceback(logger: logging.Logger) -> None:
    vllm_logs.configure_logs()
    known = logging.getLogger("vllm.v1.structured_output")
    try:
        raise RuntimeError("can't be compiled")
    except RuntimeError:
        made = known.makeRecord(
            known.name, logging.ERROR, "", 0, "Failed for %s", ("7",), sys.exc_info()
        )
    assert known.filter(made)
    assert logging.Formatter().format(made) == "Failed for 7: RuntimeError: can't be compiled"
