"""Exit codes are an interface: schedulers and the Airflow operators branch on them."""

from __future__ import annotations

import inspect

import pytest

from batchllm_operator import errors
from batchllm_operator.errors import BatchLLMError, ExitCode, Interrupted

CODES = {
    1: {"BatchLLMError", "StorageError", "EngineError", "RunaheadError", "CommitUnknownError"}
    | {"FencedError"},
    2: {"InvalidError", "SpecError", "TableError", "MissingLibraryError", "KeyColumnError"}
    | {"ModelError", "PlanError", "DamagedFileError"},
    3: {"EmptyPartitionError"},
    4: {"FailedRowsError"},
    5: {"IncompleteRunError"},
    6: {"ConflictError"},
}


def test_every_error_has_the_exit_code_that_is_documented() -> None:
    names: dict[int, set[str]] = {}
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, BatchLLMError):
            names.setdefault(int(kind.exit_code), set()).add(name)
    assert names == CODES


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
