"""Settings of our attention; they reach vLLM's workers as plain JSON in `additional_config`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from batchllm_operator.vllm_plugin.scheduler.hints import read_under

KEY: Final = "batchllm_attention"
"""Key in `additional_config`."""


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class AttentionSettings:
    """A user's choices for our attention; the defaults suit every device."""

    decode_graphs: Annotated[bool, Field(strict=True)] = False
    """Whether decode-only steps are captured as full CUDA graphs, attention included. By default
    attention runs between piecewise graphs, until full ones have been tested on a GPU."""
    prefill: Literal["flash_attention", "batchllm"] | None = None
    """What computes prefill: vLLM's FlashAttention, or our kernel. Unset: FlashAttention where it
    can (CUDA, no FP8 cache, one window in a KV cache group), our kernel elsewhere."""
    decode_threshold: Annotated[int, Field(strict=True, ge=1)] | None = None
    """Most query tokens of a request that our kernel computes beside FlashAttention. Unset: as
    many as a member of a group may have (`max_member_tokens` in the architecture's settings). A
    decode with its drafts is always ours."""
    impl: Literal["triton", "reference"] | None = None
    """Unset: Triton's kernel on a GPU, plain torch on a CPU. Tests run the kernel on a CPU, in
    Triton's interpreter."""

    @classmethod
    def from_additional_config(cls, config: object) -> AttentionSettings:
        """The settings under `KEY`, or the defaults.

        Raises:
            SpecError: the value isn't valid settings.
        """
        return read_under(KEY, config, cls) or cls()
