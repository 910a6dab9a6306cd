"""Tuned settings by architecture, from `configs/<vendor>/<architecture>.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Final

import torch

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
KV_BITS: Final = (8, 16)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Shape of a tile's steps over keys; `block_m` counts rows (query token x query head)."""

    block_m: int
    block_n: int
    """Keys per step."""
    num_stages: int
    """Stages of the software pipeline that prefetches keys and values."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Launch settings for one head size and one width of KV elements."""

    narrow: Tiling
    """For few rows: distinct parts of decoding requests. Bound by memory."""
    wide: Tiling
    """For many rows: shared prefixes and prefill. Matrix-matrix."""
    num_warps: int
    programs_per_processor: int
    """Persistent programs on each multiprocessor (compute unit)."""
    options: Mapping[str, int]
    """Further options of Triton's compiler for this vendor, such as `maxnreg`."""


@dataclass(frozen=True, slots=True)
class SplitRule:
    """When a long context is cut into parallel pieces (split-K)."""

    min_tokens: int
    """Least length of a piece."""
    pieces_per_program: int
    """Approximate pieces per persistent program."""


@dataclass(frozen=True, slots=True)
class ArchConfig:
    """All settings of one architecture.

    Raises:
        UnsupportedError: `launch_config` for a head size that has no settings.
    """

    arch: str
    gate: Gate
    split: SplitRule
    merge_in_launch: bool
    """Whether a unit's last tile merges it, instead of a second launch."""
    launch: Mapping[tuple[int, int], LaunchConfig]
    """By (head_dim, bits of a KV element)."""
    tuned_on: str | None
    """Device and library versions of its timings; None if chosen without a GPU."""

    def launch_config(self, head_dim: int, kv_bits: int) -> LaunchConfig:
        """Settings for a head size; KV wider than 16 bits (tests) uses those of 16."""
        try:
            return self.launch[head_dim, min(kv_bits, 16)]
        except KeyError:
            raise UnsupportedError(
                f"{self.arch} has no settings for head_dim {head_dim} and {kv_bits}-bit KV; it has "
                f"{sorted(self.launch)}"
            ) from None


def config_file(arch: str) -> Traversable:
    """Path of an architecture's settings.

    Raises:
        UnsupportedError: no settings ship for it.
    """
    if arch not in ARCHITECTURES and arch != CPU:
        raise UnsupportedError(
            f"no settings for the architecture {arch}; there are {', '.join(ARCHITECTURES)}"
        )
    folder = files("batchllm_kernels.prefix_attention") / "configs"
    return folder / ARCHITECTURES.get(arch, "") / f"{arch}.json"


def detect_arch(device: torch.device) -> str:
    """Architecture of a device, as in the names of settings: "sm90", "gfx942", "cpu"."""
    if device.type == CPU:
        return CPU
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm{properties.major}{properties.minor}"


def load_config(arch: str) -> ArchConfig:
    """An architecture's settings.

    Raises:
        UnsupportedError: no settings ship for it.
    """
    return parse_config(json.loads(config_file(arch).read_text()))


def parse_config(given: Mapping[str, Any]) -> ArchConfig:
    """Settings from their JSON form.

    Raises:
        ValueError: a value is missing, unknown or out of its range.
    """
    try:
        gate = Gate(
            {int(degree): tokens for degree, tokens in given["gate"]["min_prefix_tokens"].items()},
            given["gate"]["max_member_tokens"],
        )
        launch = {
            (entry["head_dim"], entry["kv_bits"]): LaunchConfig(
                Tiling(**entry["narrow"]),
                Tiling(**entry["wide"]),
                entry["num_warps"],
                entry["programs_per_processor"],
                entry["options"],
            )
            for entry in given["launch"]
        }
        config = ArchConfig(
            given["arch"],
            gate,
            SplitRule(**given["split"]),
            given["merge_in_launch"],
            launch,
            given["tuned_on"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"settings of {given.get('arch')}: {error!r}") from error
    for (head_dim, kv_bits), entry in launch.items():
        _check_launch(config.arch, head_dim, kv_bits, entry)
    if config.split.min_tokens < 1 or config.split.pieces_per_program < 1:
        raise ValueError(f"settings of {config.arch}: {config.split}")
    return config


def to_json(config: ArchConfig) -> str:
    """The text of a settings file, the inverse of `parse_config`.

    Raises:
        ValueError: `parse_config` refuses the settings.
    """
    given: Mapping[str, Any] = {
        "arch": config.arch,
        "tuned_on": config.tuned_on,
        "gate": {
            "min_prefix_tokens": {
                str(degree): tokens
                for degree, tokens in sorted(config.gate.min_prefix_tokens.items())
            },
            "max_member_tokens": config.gate.max_member_tokens,
        },
        "split": asdict(config.split),
        "merge_in_launch": config.merge_in_launch,
        "launch": [
            {"head_dim": head_dim, "kv_bits": kv_bits}
            | asdict(launch)
            | {"options": dict(launch.options)}
            for (head_dim, kv_bits), launch in config.launch.items()
        ],
    }
    parse_config(given)
    return json.dumps(given, indent=2) + "\n"


def _check_launch(arch: str, head_dim: int, kv_bits: int, entry: LaunchConfig) -> None:
    tilings = (entry.narrow, entry.wide)
    sizes = [size for tiling in tilings for size in (tiling.block_m, tiling.block_n)]
    sizes.append(entry.num_warps)
    counts = [tiling.num_stages for tiling in tilings] + [entry.programs_per_processor]
    if (
        head_dim not in HEAD_DIMS
        or kv_bits not in KV_BITS
        or any(size < 1 or size & (size - 1) for size in sizes)
        or any(tiling.block_m < 16 or tiling.block_n < 16 for tiling in tilings)
        or min(counts) < 1
        or entry.narrow.block_m > entry.wide.block_m
    ):
        raise ValueError(f"settings of {arch} for head_dim {head_dim}: {entry}")
