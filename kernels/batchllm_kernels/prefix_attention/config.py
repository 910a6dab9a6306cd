"""Tuned settings by architecture, from `configs/<vendor>/<architecture>.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import torch
from pydantic import AfterValidator, ConfigDict, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from batchllm_kernels.prefix_attention.batch import HEAD_DIMS, UnsupportedError
from batchllm_kernels.prefix_attention.grouping import Gate

ARCHITECTURES: Final[Mapping[str, str]] = {
    "sm80": "nvidia",
    "sm90": "nvidia",
    "gfx90a": "amd",
    "gfx942": "amd",
}
"""Vendor by GPU architecture, for all that have settings."""
CPU: Final = "cpu"
"""Settings for the reference and Triton's interpreter: they share whenever possible."""
_STRICT: Final = ConfigDict(extra="forbid", strict=True)


def _one_of(*sizes: int) -> AfterValidator:
    def check(size: int) -> int:
        if size not in sizes:
            raise ValueError(f"{size} isn't one of {sizes}")
        return size

    return AfterValidator(check)


_TileSize = Annotated[int, _one_of(16, 32, 64, 128, 256)]


@dataclass(frozen=True, slots=True, config=_STRICT)
class Tiling:
    """Shape of a tile's steps over keys; `block_m` counts rows (query token x query head)."""

    block_m: _TileSize
    block_n: _TileSize
    """Keys per step."""
    num_stages: PositiveInt
    """Stages of the software pipeline that prefetches keys and values."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class LaunchConfig:
    """Launch settings for one head size and one width of KV elements."""

    head_dim: Annotated[int, _one_of(*HEAD_DIMS)]
    kv_bits: Annotated[int, _one_of(8, 16)]
    narrow: Tiling
    """For few rows: distinct parts of decoding requests. Bound by memory."""
    wide: Tiling
    """For many rows: shared prefixes and prefill. Matrix-matrix."""
    num_warps: Annotated[int, _one_of(1, 2, 4, 8, 16)]
    programs_per_processor: PositiveInt
    """Persistent programs on each multiprocessor (compute unit)."""
    options: Mapping[str, int]
    """Further options of Triton's compiler for this vendor, such as `maxnreg`."""

    def __post_init__(self) -> None:
        if self.narrow.block_m > self.wide.block_m:
            raise ValueError(f"narrow.block_m must be at most wide's ({self.wide.block_m})")


@dataclass(frozen=True, slots=True, config=_STRICT)
class SplitRule:
    """When a long context is cut into parallel pieces (split-K)."""

    min_tokens: PositiveInt
    """Least length of a piece."""
    pieces_per_program: PositiveInt
    """Approximate pieces per persistent program."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class ArchConfig:
    """All settings of one architecture."""

    arch: str
    tuned_on: str | None
    """Device and library versions of its timings; None if chosen without a GPU."""
    gate: Gate
    split: SplitRule
    merge_in_launch: bool
    """Whether a unit's last tile merges it, instead of a second launch."""
    launch: tuple[LaunchConfig, ...]
    """One for each head size and width."""

    def launch_config(self, head_dim: int, kv_bits: int) -> LaunchConfig:
        """Settings for a head size, or UnsupportedError; KV of 32 bits (tests) uses those of 16."""
        by_key = {(launch.head_dim, launch.kv_bits): launch for launch in self.launch}
        if launch := by_key.get((head_dim, min(kv_bits, 16))):
            return launch
        raise UnsupportedError(
            f"{self.arch} has no settings for head_dim {head_dim} and {kv_bits}-bit KV; it has "
            f"{sorted(by_key)}"
        )


_CONFIG: Final = TypeAdapter(ArchConfig)


def config_file(arch: str) -> Path:
    """Where an architecture's settings lie; UnsupportedError if none ship for it."""
    if arch not in ARCHITECTURES and arch != CPU:
        raise UnsupportedError(
            f"no settings for the architecture {arch}; there are {', '.join(ARCHITECTURES)}"
        )
    return Path(__file__).with_name("configs") / ARCHITECTURES.get(arch, "") / f"{arch}.json"


def detect_arch(device: torch.device) -> str:
    """Architecture of a device, as in the names of settings: "sm90", "gfx942", "cpu"."""
    if device.type == CPU:
        return CPU
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm{properties.major}{properties.minor}"


def load_config(arch: str) -> ArchConfig:
    """An architecture's settings; UnsupportedError if none ship for it."""
    return parse_config(config_file(arch).read_text(), source=f"{arch}.json")


def parse_config(text: str, source: str) -> ArchConfig:
    """Settings from the text of their file, or a ValueError that names `source` and each value that
    is missing, unknown or out of its range."""
    try:
        return _CONFIG.validate_json(text)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise ValueError(f"settings in {source}: {'; '.join(faults)}") from error


def to_json(config: ArchConfig) -> str:
    """The text of a settings file, which `parse_config` takes."""
    return _CONFIG.dump_json(config, indent=2).decode() + "\n"
