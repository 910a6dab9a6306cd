"""Exact duplicates: prompts with equal token ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchllm_operator.planner import TokenTable


def first_occurrences(tokens: TokenTable) -> npt.NDArray[np.int64]:
    """For each prompt, the index of the first prompt with the same token ids.

    Token ids are compared in full (a hash table of the bytes, by pyarrow), so two
    different prompts are never joined.

    Returns:
        int64 [num_prompts], each value at most its own index.
    """
    num_prompts = len(tokens)
    if num_prompts == 0:
        return np.zeros(0, dtype=np.int64)
    byte_offsets = tokens.offsets * tokens.token_ids.itemsize
    prompts = pa.Array.from_buffers(
        pa.large_binary(),
        num_prompts,
        [None, pa.py_buffer(byte_offsets.tobytes()), pa.py_buffer(tokens.token_ids)],
    )
    codes = prompts.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    _, first_idx = np.unique(codes, return_index=True)
    first: npt.NDArray[np.int64] = first_idx[codes].astype(np.int64)
    return first
