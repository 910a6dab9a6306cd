"""Exit codes are an interface: schedulers and the Airflow operators branch on them."""

from __future__ import annotations

import inspect

import pytest

from batchllm_operator import errors
from batchllm_operator.errors import BatchLLMError, ExitCode, Interrupted

CODES = {
    "BatchLLMError": 1,
    "StorageError": 1,
    "EngineError": 1,
    "RunaheadError": 1,
    "SpecError": 2,
    "TableError": 2,
    "MissingLibraryError": 2,
    "KeyColumnError": 2,
    "ModelError": 2,
    "PlanError": 2,
    "DamagedFileError": 2,
    "EmptyPartitionError": 3,
    "FailedRowsError": 4,
    "IncompleteRunError": 5,
    "CommitUnknownError": 1,
    "ConflictError": 6,
    "FencedError": 1,
}


def test_every_error_has_the_exit_code_that_is_documented() -> None:
    found = {
        name: int(kind.exit_code)
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, BatchLLMError)
    }
    assert found == CODES


def test_exit_codes_are_distinct_and_never_change() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "OK": 0,
        "FAILURE": 1,
        "INVALID": 2,
        "EMPTY": 3,
        "TOO_MANY_FAILED_ROWS": 4,
        "INCOMPLETE": 5,
        "CONFLICT": 6,
        "INTERRUPTED": 130,
        "TERMINATED": 143,
    }


def test_an_interruption_is_not_swallowed_as_an_error() -> None:
    def work() -> None:
        try:
            raise Interrupted(15)
        except Exception:  # noqa: BLE001 - as libraries on the way do
            pytest.fail("swallowed")

    with pytest.raises(KeyboardInterrupt, match="signal 15") as caught:
        work()
    assert isinstance(caught.value, Interrupted)
    assert caught.value.signal_number == 15
