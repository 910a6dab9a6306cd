"""What a model thinks before it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

REASONING_FIELD: Final = pa.field("reasoning", pa.string())
"""Null where the model hasn't reasoned; all of the text where it was cut off before the answer."""


class ReasoningColumns:
    """The reasoning apart from the text, which is the answer alone."""

    raw_fields = (REASONING_FIELD,)
    fields = raw_fields

    def columns(self, outputs: pa.Table) -> dict[str, pa.Array]:
        return {REASONING_FIELD.name: outputs[REASONING_FIELD.name]}

    def fault(self, text: str, raw: Mapping[str, Any]) -> str | None:
        return None
