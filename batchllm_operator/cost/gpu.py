"""GPUs for estimates: a small table that users may replace by their own."""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from batchllm_operator.errors import SpecError

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
_Share = Annotated[float, Field(gt=0, le=1, strict=True)]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class GPU:
    """One GPU: numbers of its data sheet, and the shares that an engine reaches."""

    name: str
    memory_bytes: _Positive
    hbm_bytes_per_s: _Positive
    bf16_flop_per_s: _Positive
    """Dense, without sparsity."""
    achievable_compute: _Share
    """Share of the peak rate that large matrix products reach."""
    achievable_bandwidth: _Share
    """Share of the peak bandwidth that decoding reaches."""
    achievable_memory: _Share
    """Share of the memory that weights and KV cache may take."""
    step_overhead_s: _NotNegative
    """Seconds added to each engine step."""
    usd_per_hour: _NotNegative

    @property
    def flop_per_s(self) -> float:
        """FLOP/s that the engine reaches."""
        return self.bf16_flop_per_s * self.achievable_compute

    @property
    def bytes_per_s(self) -> float:
        """Bytes/s that the engine reaches."""
        return self.hbm_bytes_per_s * self.achievable_bandwidth


_GPUS: Final = TypeAdapter(dict[str, GPU])


def read_gpu_table(path: Path | None = None) -> dict[str, GPU]:
    """The GPUs of a TOML file by name, by default of the built-in table (`gpus.toml`).

    Raises:
        SpecError: the file can't be read, or a table in it isn't a GPU; names file, GPU and field.
    """
    where = f"planner.gpu_table: {path}" if path else "gpus.toml"
    try:
        text = (path or files("batchllm_operator.cost") / "gpus.toml").read_text("utf-8")
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{where}: can't be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{where}: not TOML: {error}") from error
    for name, table in tables.items():
        if isinstance(table, dict):
            table["name"] = name
    try:
        return _GPUS.validate_python(tables)
    except ValidationError as error:
        faults = {".".join(map(str, fault["loc"][:2])): fault["msg"] for fault in error.errors()}
        named = "; ".join(f"{place}: {message}" for place, message in faults.items())
        raise SpecError(f"{where}: {named}") from error


def find_gpu(name: str, path: Path | None = None) -> GPU:
    """The GPU of that name in a table (see `read_gpu_table`).

    Raises `SpecError`: as `read_gpu_table`, or the table lacks the GPU.
    """
    gpus = read_gpu_table(path)
    if name not in gpus:
        known = ", ".join(gpus) or "none"
        raise SpecError(
            f"planner.target_gpu: {path or 'the built-in table'} has no GPU {name!r}; it has"
            f" {known}; planner.gpu_table can name a table of your own"
        )
    return gpus[name]
