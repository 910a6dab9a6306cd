"""Several answers to one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

TEXTS_FIELD: Final = pa.field("generated_texts", pa.list_(pa.string()))
"""All answers of a row; `generated_text` is the first of them."""


class SampleColumns:
    """A list of texts, which parts keep as it is published."""

    raw_fields = (TEXTS_FIELD,)
    fields = raw_fields

    def columns(self, outputs: pa.Table) -> dict[str, pa.Array]:
        return {TEXTS_FIELD.name: outputs[TEXTS_FIELD.name]}

    def fault(self, text: str, raw: Mapping[str, Any]) -> str | None:
        return None
