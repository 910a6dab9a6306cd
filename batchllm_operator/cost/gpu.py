"""GPUs for estimates: a small table that users may replace by their own."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Final

from batchllm_operator.errors import SpecError

_SHARES: Final = ("achievable_compute", "achievable_bandwidth", "achievable_memory")
_MAY_BE_ZERO: Final = ("step_overhead_s", "usd_per_hour")


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU: numbers of its data sheet, and the shares that an engine reaches.

    Raises:
        SpecError: a value isn't a finite number in its range.
    """

    name: str
    memory_bytes: float
    hbm_bytes_per_s: float
    bf16_flop_per_s: float
    """Dense, without sparsity."""
    achievable_compute: float
    """Share of the peak rate that large matrix products reach, above 0 and at most 1."""
    achievable_bandwidth: float
    """Share of the peak bandwidth that decoding reaches."""
    achievable_memory: float
    """Share of the memory that weights and KV cache may take."""
    step_overhead_s: float
    """Seconds added to each engine step."""
    usd_per_hour: float

    def __post_init__(self) -> None:
        for name, value in self.numbers().items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SpecError(f"GPU {self.name}: {name} must be a number")
            least_is_zero = name in _MAY_BE_ZERO
            if not math.isfinite(value) or value < 0 or (value == 0 and not least_is_zero):
                raise SpecError(f"GPU {self.name}: {name} must be finite and above 0")
            if name in _SHARES and value > 1:
                raise SpecError(f"GPU {self.name}: {name} is a share, at most 1")

    @property
    def flop_per_s(self) -> float:
        """FLOP/s that the engine reaches."""
        return self.bf16_flop_per_s * self.achievable_compute

    @property
    def bytes_per_s(self) -> float:
        """Bytes/s that the engine reaches."""
        return self.hbm_bytes_per_s * self.achievable_bandwidth

    def numbers(self) -> dict[str, float]:
        """All fields but the name."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}


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
    return {name: _as_gpu(where, name, table) for name, table in tables.items()}


def find_gpu(name: str, path: Path | None = None) -> GPU:
    """The GPU of that name in a table (see `read_gpu_table`).

    Raises:
        SpecError: as `read_gpu_table`, or the table lacks the GPU.
    """
    gpus = read_gpu_table(path)
    if name not in gpus:
        known = ", ".join(gpus) or "none"
        raise SpecError(
            f"planner.target_gpu: {path or 'the built-in table'} has no GPU {name!r}; it has"
            f" {known}; planner.gpu_table can name a table of your own"
        )
    return gpus[name]


def _as_gpu(where: str, name: str, table: object) -> GPU:
    wanted = {field.name for field in fields(GPU)} - {"name"}
    if not isinstance(table, Mapping):
        raise SpecError(f"{where}: {name} must be a table of fields")
    if wrong := sorted(wanted ^ set(table)):
        raise SpecError(f"{where}: GPU {name} has missing or unknown fields: {', '.join(wrong)}")
    try:
        return GPU(name=name, **table)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error
