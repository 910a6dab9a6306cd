"""What an error says of a library that is missing: which extra brings it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from batchllm_operator.errors import _EXTRAS, MissingLibraryError


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
