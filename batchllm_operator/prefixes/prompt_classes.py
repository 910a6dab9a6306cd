"""Classes of prompts: two prompts share something only within a class.

A prompt's class is a part of its first token, so that sorting, groups and shards keep classes apart
and side by side without knowing of them. Lengths stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes.algorithm1 import PrefixGroups
from batchllm_operator.prefixes.requests import Requests
from batchllm_operator.prefixes.token_table import MAX_TOKEN_ID, TokenTable


@dataclass(frozen=True, slots=True)
class PromptClasses:
    """Classes [0, num_classes) of prompts; the first token `t` of class `c` is `c * bound + t`.

    Attributes:
        bound: above all token ids of prompts.

    Raises:
        PlanError: such tokens don't fit into 31 bits.
    """

    bound: int
    num_classes: int

    def __post_init__(self) -> None:
        if self.bound * self.num_classes - 1 > MAX_TOKEN_ID:
            raise PlanError(
                f"{self.num_classes} classes of prompts with {self.bound} tokens are too many: at"
                f" most {(MAX_TOKEN_ID + 1) // self.bound} can be planned"
            )

    def mark(self, tokens: TokenTable, classes: NDArray[np.int64]) -> TokenTable:
        """The prompts with their classes.

        Args:
            tokens: ids below `bound`; an empty prompt stays so.
            classes: [num_prompts] int64.
        """
        has_token = tokens.lengths > 0
        firsts = tokens.offsets[:-1][has_token]
        token_ids = tokens.token_ids.copy()
        token_ids[firsts] += (classes[has_token] * self.bound).astype(np.int32)
        return TokenTable(token_ids, tokens.offsets)

    def unmark(self, tokens: TokenTable) -> tuple[TokenTable, NDArray[np.int64]]:
        """The prompts as they were before `mark`, and their classes: [num_prompts] int64.

        Args:
            tokens: none of the prompts is empty.
        """
        firsts = tokens.offsets[:-1]
        classes = tokens.token_ids[firsts].astype(np.int64) // self.bound
        token_ids = tokens.token_ids.copy()
        token_ids[firsts] %= self.bound
        return TokenTable(token_ids, tokens.offsets), classes

    def of_groups(self, groups: PrefixGroups, requests: Requests) -> NDArray[np.int64]:
        """The class of each group: [num_groups] int64."""
        prompt_idxs = requests.prompt_idxs[groups.member_idxs[groups.offsets[:-1]]]
        firsts = requests.prompts.slices(prompt_idxs, 0, 1)
        return self.unmark(firsts)[1]
