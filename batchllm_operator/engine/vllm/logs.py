"""Filters vLLM's log lines that appear in every run, and clears what it stumbles over."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from batchllm_operator.engine.gpus import runs_on_cpu
from batchllm_operator.errors import one_line

LEVEL: Final = "VLLM_LOGGING_LEVEL"
_OURS: Final = "BATCHLLM_VLLM_LOGGING_LEVEL"
"""Holds the level that we have set, by which a process that this one starts knows it as ours."""
_STREAM: Final = "VLLM_LOGGING_STREAM"
_EVERY_RUN: Final[Mapping[str, tuple[str, ...]]] = {
    # We choose the seed, the scheduler and the form of prompts.
    "engine.arg_utils": ("The global random seed is set to",),
    "v1.core.sched.scheduler": ("Using custom scheduler class",),
    "config.scheduler": ("Using custom scheduler class",),
    "v1.engine.input_processor": ("Passing raw prompts to InputProcessor is deprecated",),
    # Limits of CPUs, and hints to make them faster.
    "model_executor.layers.utils": ("Failed to create oneDNN linear",),
    "platforms.cpu": (
        "Triton is not installed. triton-cpu is expected",
        "Reset SSM cache type to float32",  # of Mamba's layers; logged for all models
    ),
    "triton_utils.importing": ("Triton is installed, but doesn't include CPU backend",),
    "v1.worker.cpu_worker": (
        "%s is not found in LD_PRELOAD",
        "CPU backend doesn't allow to use `torch.set_num_threads`",
    ),
    # A model that is stored in one type and computed in another: engine.dtype, or vLLM's default.
    "model_executor.models.utils": ("Attempted to load weight %s with dtype",),
}
"""Warnings of every run that users can't avoid: loggers below `vllm`, and the beginnings of their
messages. A message that vLLM rewords just appears again."""
_ON_CPU: Final[Mapping[str, tuple[str, ...]]] = {
    "config.vllm": (
        "Enforce eager set, disabling torch.compile",
        "Inductor compilation was disabled by user settings",
        "Model Runner V2 requires Triton",
    ),
}
"""The same on a CPU alone: on a GPU they follow from the user's settings."""


def configure_logs() -> None:
    """Filter the lines of every run, unless the user has chosen a level."""
    os.environ.setdefault(_STREAM, "ext://sys.stderr")  # stdout is for results
    if not sys.warnoptions:  # warnings are for developers; -W and PYTHONWARNINGS enable them
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    if os.environ.get(LEVEL) != os.environ.get(_OURS):
        return
    os.environ[LEVEL] = os.environ[_OURS] = "WARNING"
    logging.getLogger("vllm.v1.structured_output").addFilter(_without_traceback)
    for name, starts in {**_EVERY_RUN, **(_ON_CPU if runs_on_cpu() else {})}.items():
        logging.getLogger(f"vllm.{name}").addFilter(_without(starts))


def _without_traceback(record: logging.LogRecord) -> bool:
    """Replace a traceback by its error in one line, for faults that each row repeats."""
    if record.exc_info and (error := record.exc_info[1]) is not None:
        record.msg = f"{record.getMessage()}: {one_line(error)}"
        record.args, record.exc_info = None, None
    return True


def _without(starts: tuple[str, ...]) -> Callable[[logging.LogRecord], bool]:
    """A filter of warnings that begin like this."""
    return lambda record: record.levelno > logging.WARNING or not str(record.msg).startswith(starts)


@contextmanager
def without_llvmlite() -> Iterator[None]:
    """Remove one module of llvmlite (numba's compiler) from `sys.modules` inside the context.

    vLLM 0.32 on CPU searches all loaded modules when it starts, and fails at an object in that one
    whose `__dict__` isn't a dict.
    """
    name = "llvmlite.binding.ffi"
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module
