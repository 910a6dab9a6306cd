"""A DataFrame answered by trained weights: the texts of stock vLLM, in the frame's order."""

from pathlib import Path

import pandas as pd
from support.demo_job import Demo, snippet_prompt
from support.messy_table import answerable, messy_rows

from batchllm_operator import generate

ROWS = answerable(messy_rows())


def test_each_row_of_a_frame_has_the_text_of_stock_vllm(real: Demo, tmp_path: Path) -> None:
    frame = pd.DataFrame(messy_rows(), index=[f"row {idx}" for idx in range(len(messy_rows()))])
    answered = generate(
        frame,
        "Document: {document}\nQuery: {query}\nSnippet:",
        model=real.model,
        cache=tmp_path,
        system="Write a short snippet that answers the query.\n",
        sampling={"max_tokens": 16},
        engine={"dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 1 << 28},
    )
    pd.testing.assert_frame_equal(answered[[*frame]], frame)
    failed = answered[answered["status"] == "rejected"]
    assert [error["kind"] for error in failed["error"]] == ["null_value"] * len(failed)
    texts = answered.drop(index=failed.index)["generated_text"].tolist()
    [stock] = real.stock("texts", {"float32": [[*map(snippet_prompt, ROWS)]]})["float32"]
    assert texts == [each["text"] for each in stock]
