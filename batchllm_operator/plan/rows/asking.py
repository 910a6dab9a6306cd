"""The prompts that ask some rows a question, where its condition holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.lake import rows_meeting
from batchllm_operator.plan.rows.adapters import RowAdapters
from batchllm_operator.plan.rows.prompting import Prompter
from batchllm_operator.prefixes import TokenTable
from batchllm_operator.prefixes.jit import Int64s
from batchllm_operator.prompts import NULL_VALUE, Tokenizer, length_fault
from batchllm_operator.row_error import ANSWERED, UNASKED, RowError
from batchllm_operator.spec import JobSpec
from batchllm_operator.spec.rounds import answers_named


@dataclass(frozen=True, slots=True)
class Asked:
    """Prompts that ask one question of some rows."""

    asks: Int64s
    """int64 [num_prompts], ascending; counted from the first of these rows."""
    tokens: TokenTable
    estimates: Int64s | None
    errors: Mapping[int, RowError]
    """Of the question's other asks."""
    num_asked: int
    """Rows that weren't skipped."""
    control_rows: Collection[int]
    num_truncated: int
    num_bytes: int


class Asker:
    """Makes the prompts that ask one of a job's questions, which has a number."""

    def __init__(
        self,
        spec: JobSpec,
        number: int,
        question: JobSpec,
        tokenizer: Tokenizer,
        adapters: RowAdapters | None,
    ) -> None:
        self._number, self._num = number, len(spec.prompts) or 1
        self._question, self._tokenizer = question, tokenizer
        self._prompter = Prompter(question, tokenizer, adapters)
        self._where = f"{spec.prompt_fields[number]}.when"
        prompt = list(spec.prompts.values())[number] if spec.prompts else None
        self._when = () if prompt is None else prompt.when
        needed = () if prompt is None else answers_named(prompt, spec.prompts).values()
        self._needed = sorted(set(needed))

    def ask(self, rows: pa.RecordBatch) -> Asked:
        """Ask rows, which have the columns and answers that the prompt names.

        Raises `ModelError`, `TokenIdsDifferError`: see `Tokenizer.encode`.
        """
        chosen = self._chosen(rows)
        is_whole = len(chosen) == rows.num_rows
        some = rows if is_whole else rows.take(pa.array(chosen))
        made = self._prompter.prompts(some)
        tokens, idxs = made.tokens, made.rendered.idxs
        faults = dict(made.rendered.errors)
        fits = (tokens.lengths > 0) & (tokens.lengths <= self._tokenizer.max_prompt_len)
        for number in np.flatnonzero(~fits).tolist():
            fault = length_fault(int(tokens.lengths[number]), self._tokenizer)
            assert fault is not None, number
            faults[int(idxs[number])] = fault
        idxs, tokens = taken(idxs, tokens, fits)
        skips = self._question.input.on_null == "skip"
        nulls = [row for row, fault in faults.items() if skips and fault.kind == NULL_VALUE]
        faults |= dict.fromkeys(nulls, UNASKED)
        estimates = _estimates(self._question, some)
        errors = {int(chosen[row]): fault for row, fault in faults.items()}
        if not is_whole:
            skipped = np.setdiff1d(np.arange(rows.num_rows), chosen).tolist()
            errors |= dict.fromkeys(skipped, UNASKED)
        return Asked(
            asks=chosen[idxs] * self._num + self._number,
            tokens=tokens,
            estimates=None if estimates is None else estimates[idxs],
            errors={row * self._num + self._number: error for row, error in errors.items()},
            num_asked=len(chosen) - len(nulls),
            control_rows=made.rendered.control_rows,
            num_truncated=made.num_truncated,
            num_bytes=int(pc.sum(pc.binary_length(made.rendered.texts)).as_py() or 0),
        )

    def _chosen(self, rows: pa.RecordBatch) -> Int64s:
        """The rows that meet the condition, and have the answers that it and the prompt need."""
        is_asked = rows_meeting(self._where, self._when, rows)
        for name in self._needed:
            has_answer = pc.is_in(rows.column(f"{name}.status"), pa.array(ANSWERED))
            is_asked &= has_answer.to_numpy(zero_copy_only=False)
        return np.flatnonzero(is_asked)


def woven(pieces: Sequence[Asked]) -> tuple[Int64s, TokenTable, Int64s | None]:
    """All prompts by their asks, which ascend, with the estimates of their outputs."""
    if len(pieces) == 1:
        return pieces[0].asks, pieces[0].tokens, pieces[0].estimates
    asks = np.concatenate([piece.asks for piece in pieces])
    order = np.argsort(asks)
    lengths = np.concatenate([piece.tokens.lengths for piece in pieces])
    token_ids = np.concatenate([piece.tokens.token_ids for piece in pieces])
    tokens = TokenTable(token_ids, np.append(0, np.cumsum(lengths))).take(order)
    expected = [piece.estimates for piece in pieces if piece.estimates is not None]
    return asks[order], tokens, np.concatenate(expected)[order] if expected else None


def taken(
    idxs: Int64s, tokens: TokenTable, chosen: npt.NDArray[np.bool_]
) -> tuple[Int64s, TokenTable]:
    if chosen.all():
        return idxs, tokens
    return idxs[chosen], tokens.take(np.flatnonzero(chosen))


def _estimates(spec: JobSpec, batch: pa.RecordBatch) -> Int64s | None:
    """Estimated output tokens of the batch's rows, if a column holds them."""
    most, least = spec.sampling.max_tokens, max(1, spec.sampling.min_tokens)
    for name in spec.planner.estimate_columns:
        values = batch.column(name).to_pylist()
        return np.array([most if v is None else max(least, min(v, most)) for v in values])
    return None
