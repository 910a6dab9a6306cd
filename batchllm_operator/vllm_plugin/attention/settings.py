"""Settings of our attention; they reach vLLM's workers as plain JSON in `additional_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal

from batchllm_operator.errors import SpecError

KEY: Final = "batchllm_attention"
"""Key in `additional_config`."""


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """A user's choices for our attention; the defaults suit every device.

    Raises:
        SpecError: a value is invalid.
    """

    decode_graphs: bool = False
    """Whether decode-only steps are captured as full CUDA graphs, attention included. By default
    attention runs between piecewise graphs, until full ones have been tested on a GPU."""
    prefill: Literal["flash_attention", "batchllm"] | None = None
    """What computes prefill: vLLM's FlashAttention, or our kernel. Unset: FlashAttention where it
    can (CUDA, no FP8 cache, one window in a KV cache group), our kernel elsewhere."""
    decode_threshold: int | None = None
    """Most query tokens of a request that our kernel computes beside FlashAttention. Unset: as
    many as a member of a group may have (`max_member_tokens` in the architecture's settings). A
    decode with its drafts is always ours."""
    impl: Literal["triton", "reference"] | None = None
    """Unset: Triton's kernel on a GPU, plain torch on a CPU. Tests run the kernel on a CPU, in
    Triton's interpreter."""

    def __post_init__(self) -> None:
        if not isinstance(self.decode_graphs, bool):
            raise SpecError(f"{KEY}.decode_graphs: must be true or false")
        if self.prefill not in (None, "flash_attention", "batchllm"):
            raise SpecError(
                f"{KEY}.prefill: must be flash_attention or batchllm, not {self.prefill!r}"
            )
        threshold = self.decode_threshold
        if threshold is not None and (type(threshold) is not int or threshold < 1):
            raise SpecError(f"{KEY}.decode_threshold: must be a whole number above 0")
        if self.impl not in (None, "triton", "reference"):
            raise SpecError(f"{KEY}.impl: must be triton or reference, not {self.impl!r}")

    @classmethod
    def from_additional_config(cls, config: object) -> AttentionSettings:
        """The settings under `KEY`, or the defaults.

        Raises:
            SpecError: the value isn't valid settings.
        """
        if not isinstance(config, Mapping) or KEY not in config:
            return cls()
        given = config[KEY]
        if not isinstance(given, Mapping):
            raise SpecError(f"{KEY}: must be an object, not {type(given).__name__}")
        if unknown := sorted(set(given) - {field.name for field in fields(cls)}):
            raise SpecError(f"{KEY}: has no {', '.join(map(str, unknown))}")
        return cls(**given)
