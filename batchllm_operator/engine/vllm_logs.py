"""What vLLM logs of a batch job: all but the lines that come with every run.

Loaded before vLLM, which reads the environment when it is imported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

LEVEL: Final = "VLLM_LOGGING_LEVEL"
_MAX_ERROR_CHARS: Final = 400
_SETTINGS: Final = {
    LEVEL: "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for what the command gives
}
_EVERY_RUN: Final[Mapping[str, tuple[str, ...]]] = {
    # We choose the seed, the scheduler and how prompts are given.
    "engine.arg_utils": ("The global random seed is set to",),
    "v1.core.sched.scheduler": ("Using custom scheduler class",),
    "config.scheduler": ("Using custom scheduler class",),
    "v1.engine.input_processor": ("Passing raw prompts to InputProcessor is deprecated",),
    # On a CPU, which is for trying things out: what it can't do, and what would be faster.
    "triton_utils.importing": ("Triton is installed, but doesn't include CPU backend",),
    "platforms.cpu": ("Triton is not installed. triton-cpu is expected",),
    "v1.worker.cpu_worker": (
        "%s is not found in LD_PRELOAD",
        "CPU backend doesn't allow to use `torch.set_num_threads`",
    ),
}
"""Warnings that come with every run, and that users can do nothing about: loggers below
`vllm`, and how their messages begin. A message that vLLM rewords one day is merely seen again."""
_ON_CPU: Final[Mapping[str, tuple[str, ...]]] = {
    "config.vllm": (
        "Enforce eager set, disabling torch.compile",
        "Inductor compilation was disabled by user settings",
        "Model Runner V2 requires Triton",
    ),
}
"""The same where vLLM runs on a CPU. On a GPU these come of the user's settings."""


def configure_logs() -> None:
    """Leave out what comes with every run; where the user has chosen a level, log everything."""
    is_chosen = LEVEL in os.environ
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if not is_chosen:
        for name, starts in _EVERY_RUN.items():
            logging.getLogger(f"vllm.{name}").addFilter(_Without(starts))
        for name, starts in _ON_CPU.items():
            logging.getLogger(f"vllm.{name}").addFilter(_WithoutOnCPU(starts))


class _Without(logging.Filter):
    def __init__(self, starts: tuple[str, ...]) -> None:
        super().__init__()
        self._starts = starts

    def filter(self, record: logging.LogRecord) -> bool:
        is_known = record.levelno <= logging.WARNING and isinstance(record.msg, str)
        return not (is_known and record.msg.startswith(self._starts))


class _WithoutOnCPU(_Without):
    def filter(self, record: logging.LogRecord) -> bool:
        from vllm.platforms import current_platform  # known only once vLLM is imported

        return super().filter(record) or not current_platform.is_cpu()


def drop_broken_preloads(environment: MutableMapping[str, str]) -> None:
    """Take libraries out of LD_PRELOAD that lie below a folder with a space in its name.

    vLLM's CPU platform puts the environment's own there, for processes that it starts; ld.so splits
    the list at spaces, and each of these processes would print errors.
    """
    paths = environment.get("LD_PRELOAD", "").split(":")
    kept = [path for path in paths if " " not in path or not Path(path).exists()]
    if kept != paths:
        environment["LD_PRELOAD"] = ":".join(kept)


def one_line(error: BaseException) -> str:
    """A fault of vLLM's in one line of a bearable length."""
    text = " ".join(str(error).split())
    clipped = text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "..."
    return f"{type(error).__name__}: {clipped}" if text else type(error).__name__
