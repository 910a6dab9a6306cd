"""Exit codes, on which schedulers and operators branch, and what is said of missing libraries."""

import inspect
import tomllib
from pathlib import Path

import pytest

from batchllm_operator import errors
from batchllm_operator.errors import (
    _EXTRAS,
    BatchLLMError,
    ExitCode,
    Interrupted,
    MissingLibraryError,
)

CODES = {
    1: {"BatchLLMError", "StorageError", "EngineError", "RunaheadError", "CommitUnknownError"}
    | {"FencedError"},
    2: {"InvalidError", "SpecError", "TableError", "MissingLibraryError", "KeyColumnError"}
    | {"ModelError", "PlanError", "DamagedFileError"},
    3: {"EmptyPartitionError"},
    4: {"FailedRowsError", "ExpectationError"},
    5: {"IncompleteRunError"},
    6: {"ConflictError"},
    7: {"LimitError"},
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
        "REFUSED": 4,
        "INCOMPLETE": 5,
        "CONFLICT": 6,
        "LIMIT": 7,
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


# Missing libraries


def test_a_library_of_no_extra_is_named_too() -> None:
    error = ModuleNotFoundError("No module named 'zmq.asyncio'", name="zmq.asyncio")
    text = str(MissingLibraryError.of(error, "vLLM"))
    assert text == (
        "vLLM: needs the library zmq, which isn't installed; install the package that brings it,"
        " often: pip install zmq"
    )


def test_extras_are_those_that_there_are() -> None:
    text = Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    for library, names in _EXTRAS.items():
        for name in names:
            brought = [each.removeprefix("apache-") for each in extras[name]]
            assert any(each.startswith((library, "vllm")) for each in brought), (library, name)
        message = str(MissingLibraryError.of(ModuleNotFoundError(name=library), "this"))
        assert f"pip install '.[{names[0]}]' in a checkout" in message
        assert f"-py3-none-any.whl[{names[0]}]' of a wheel" in message
