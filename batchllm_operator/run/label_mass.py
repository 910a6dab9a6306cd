"""Watches how much of the model's probability the labels hold, while a job classifies."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

import numpy as np

from batchllm_operator.amounts import counted
from batchllm_operator.answers.labels import LOGPROBS_FIELD, label_mass, low_mass_warning
from batchllm_operator.engine import EngineOutput
from batchllm_operator.spec import JobSpec

_NUM_FIRST: Final = 64
_log = logging.getLogger(__name__)


class LabelMass:
    """The mean `label_mass` of the answers so far; warns early if it is low, once."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec, self._sum, self._num = spec, 0.0, 0
        self._written = Counter[str]()
        self._has_judged = False

    @property
    def note(self) -> str:
        """For a progress line; empty for another task, and before the first answer."""
        return f", labels hold {self._sum / self._num:.2g} of the probability" if self._num else ""

    def count(self, output: EngineOutput) -> None:
        """Count an output, if it has a label; warn once enough have come."""
        logprobs = output.raw.get(LOGPROBS_FIELD.name)
        if output.error is not None or logprobs is None:
            return
        mass = float(label_mass(np.array([logprobs]))[0])
        if np.isfinite(mass):
            self._sum, self._num = self._sum + mass, self._num + 1
            self._written[output.text or ""] += not self._has_judged
        if self._num == _NUM_FIRST:
            self.judge()

    def judge(self) -> None:
        """Warn if the mean of the answers so far is low; a second call does nothing."""
        if self._has_judged or not self._num:
            return
        self._has_judged = True
        mean = self._sum / self._num
        if (warning := low_mass_warning(self._spec, mean, self._written)) is not None:
            _log.warning("the first %s: %s", counted(self._num, "answer"), warning)
