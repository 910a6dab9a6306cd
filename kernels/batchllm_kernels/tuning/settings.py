"""Writes settings as the JSON that ships, and describes the device of their timings."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from typing import Any

import torch
import triton

from batchllm_kernels.prefix_attention.config import ArchConfig, parse_config


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


def describe_device(device: torch.device, what: str) -> str:
    """For `tuned_on`: device, driver, library versions and date, and the tuned settings."""
    name = torch.cuda.get_device_properties(device).name
    return (
        f"{name}, driver {_driver_version()}, torch {torch.__version__}, "
        f"Triton {triton.__version__}, {date.today().isoformat()}: {what}"
    )


def _driver_version() -> str:
    if torch.version.hip:
        return f"of ROCm {torch.version.hip}"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said.stdout.split()[0] if said.stdout.split() else "unknown"
