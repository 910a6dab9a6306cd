"""From rows to prompts: rendered, tokenized and, where the spec says so, cut to what fits."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.model import ChatRefusedError
from batchllm_operator.plan.rows.adapters import RowAdapters
from batchllm_operator.prefixes import TokenTable
from batchllm_operator.prefixes.jit import Int32s, Int64s
from batchllm_operator.prompts import (
    PROMPT_TOO_LONG,
    RenderedPrompts,
    Tokenizer,
    sample_chat,
    text_column,
)
from batchllm_operator.row_error import RowError
from batchllm_operator.spec import JobSpec
from batchllm_operator.spec.prompt import FIELD_ORDERS, Cut

_MOST_PROMPTS: Final = 64  # that are looked at for a doubled control token
_PATIENT_ROUNDS: Final = 4
"""Cuts by just what is too much; later ones are larger, so that no prompt takes many."""
_log = logging.getLogger(__name__)

_Texts = dict[str, list[str | None]]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of a batch of rows."""

    rendered: RenderedPrompts
    """Has a text for each prompt, in the same order; for the other rows, an error."""
    tokens: TokenTable
    num_truncated: int = 0
    """Rows of which a value was cut."""


class Prompter:
    """Makes prompts of rows, as a spec says.

    With `prompt.truncate`, a prompt that leaves the answer too little room is cut: a value of n
    tokens to its share of those that are left, of which the text is then tokenized with the rest of
    the prompt, and cut again if that doesn't fit. Vectors of a text whose end (or start) is cut are
    those of sentence-transformers, which cuts token ids.
    """

    def __init__(self, spec: JobSpec, tokenizer: Tokenizer, adapters: RowAdapters | None) -> None:
        self._cuts = spec.prompt.truncate
        self._tokenizer = tokenizer
        self._adapters = adapters and replace(adapters, tokenizer=tokenizer)
        fills_nulls = spec.input.on_null == "empty"
        self._renderer = tokenizer.renderer(spec.prompt, fills_nulls=fills_nulls)
        adapter = filter(None, [spec.model.adapter_column])
        self._columns = {*spec.prompt.columns, *adapter, FIELD_ORDERS}
        self._most = tokenizer.max_prompt_len
        if self._cuts and not spec.is_pooled:
            room = min(spec.sampling.max_tokens, tokenizer.max_model_len // 2)
            self._most = min(self._most, tokenizer.max_model_len - room)
        self._id_cut = _id_cut(spec) if adapters is None else None

    def prompts(self, rows: pa.RecordBatch) -> Prompts:
        """The prompts of rows, which have all columns of the spec's prompt.

        Raises `ModelError`, `TokenIdsDifferError`: see `Tokenizer.encode`.
        """
        if not self._cuts:
            return self._made(rows)
        rows, is_cut = self._without_excess(rows)
        prompts = self._made(rows)
        long = np.flatnonzero(prompts.tokens.lengths > self._most)
        if len(long):
            old = prompts.tokens
            if self._id_cut is not None:
                new_ids = self._cut_ids(old, long, self._id_cut)
            else:
                new_ids = self._shortened(rows, prompts, long)
            ids = (new_ids.get(idx, old.prompt(idx)) for idx in range(len(old)))
            prompts = replace(prompts, tokens=TokenTable.from_lists(ids))
        idxs = prompts.rendered.idxs
        is_cut[idxs[long]] = True
        fits = prompts.tokens.lengths <= self._tokenizer.max_prompt_len
        return replace(prompts, num_truncated=int(np.count_nonzero(is_cut[idxs] & fits)))

    def _made(self, rows: pa.RecordBatch) -> Prompts:
        rendered = self._renderer.render(rows)
        rendered = rendered.with_errors(self._huge(rendered, rows))
        if self._adapters is not None:
            return Prompts(*self._adapters.encode(rendered, rows))
        return Prompts(rendered, self._tokenizer.encode(rendered.present()))

    def _huge(self, rendered: RenderedPrompts, rows: pa.RecordBatch) -> dict[int, RowError]:
        """Errors for texts that are too long whatever their tokens are."""
        most, num_bytes = self._tokenizer.max_prompt_bytes, pc.binary_length(rendered.texts)
        allowed: pa.Array | pa.Scalar = pa.scalar(most, pa.int64())
        for name in self._cuts:
            cut = pc.binary_length(text_column(rows.column(name)).texts)
            allowed = pc.add(allowed, pc.fill_null(cut, 0))
        is_huge = pc.greater(num_bytes, allowed).fill_null(False).to_numpy(zero_copy_only=False)
        return {
            row: RowError(
                PROMPT_TOO_LONG,
                f"{num_bytes[row]} bytes of text; more than {most} aren't tokenized where the model"
                f" allows {self._tokenizer.max_prompt_len} tokens",
            )
            for row in np.flatnonzero(is_huge).tolist()
        }

    def _without_excess(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, npt.NDArray[np.bool_]]:
        """Without the text of cut values that can't fit, which isn't worth tokenizing."""
        is_cut = np.zeros(rows.num_rows, dtype=np.bool_)
        most = self._tokenizer.max_prompt_bytes  # as many characters have at least as many bytes
        for name, cut in self._cuts.items():
            texts = text_column(rows.column(name)).texts
            is_long = pc.greater(pc.utf8_length(texts), most).fill_null(False)
            chosen = np.flatnonzero(is_long.to_numpy(zero_copy_only=False)).tolist()
            if chosen:
                values, (head, tail) = texts.to_pylist(), _kept(most, cut)
                for row in chosen:
                    values[row] = values[row][:head] + values[row][len(values[row]) - tail :]
                rows = _with_texts(rows, {name: values})
                is_cut[chosen] = True
        return rows, is_cut

    def _cut_ids(self, tokens: TokenTable, long: Int64s, cut: Cut) -> dict[int, Int32s]:
        """The prompts at `long` without their last or first ids, but with special ones around."""
        nothing, some = self._tokenizer.encode(["", "a"]).to_lists()
        same = [a == b for a, b in zip(nothing, some, strict=False)]
        before = same.index(False) if False in same else len(same)
        after, most = len(nothing) - before, self._most
        new_ids = {}
        for idx in long.tolist():
            ids = tokens.prompt(idx)
            kept = (ids[: most - after], ids[len(ids) - after :])
            if cut == "start":
                kept = (ids[:before], ids[len(ids) - most + before :])
            new_ids[idx] = np.concatenate(kept)
        return new_ids

    def _shortened(self, rows: pa.RecordBatch, prompts: Prompts, long: Int64s) -> dict[int, Int32s]:
        """Ids of shorter prompts for those at `long`, as far as they can be cut."""
        row_idxs = prompts.rendered.idxs[long]
        rows = rows.select([name for name in rows.schema.names if name in self._columns])
        sources: _Texts = {
            name: text_column(rows.column(name)).texts.take(pa.array(row_idxs)).to_pylist()
            for name in self._cuts
        }
        spans = {name: self._tokenizer.spans(texts) for name, texts in sources.items()}
        sizes = np.array([[len(span) for span in spans[name]] for name in self._cuts])
        over = prompts.tokens.lengths[long] - self._most
        new_ids: dict[int, Int32s] = {}
        left = np.flatnonzero(sizes.sum(axis=0))
        number = 0
        while len(left):
            total = sizes[:, left].sum(axis=0)
            excess = over[left] << max(0, number - _PATIENT_ROUNDS)
            sizes[:, left] = sizes[:, left] * np.maximum(total - excess, 0) // total
            texts: _Texts = {
                name: [
                    _cut(sources[name][idx], spans[name][idx], int(sizes[column, idx]), cut)
                    for idx in left.tolist()
                ]
                for column, (name, cut) in enumerate(self._cuts.items())
            }
            again = self._made(_with_texts(rows.take(pa.array(row_idxs[left])), texts))
            made = left[again.rendered.idxs]
            over[made] = again.tokens.lengths - self._most
            is_last = (over[made] <= 0) | (sizes[:, made].sum(axis=0) == 0)
            for place in np.flatnonzero(is_last).tolist():
                ids = again.tokens.prompt(place)
                if len(ids) <= self._tokenizer.max_prompt_len:
                    new_ids[int(long[made[place]])] = ids
            left = made[~is_last]
            number += 1
        return new_ids


def _id_cut(spec: JobSpec) -> Cut | None:
    """How token ids are cut: of vectors, where all that is cut lies at the text's end or start."""
    prompt = spec.prompt
    if not spec.is_pooled or prompt.chat_template or len(prompt.truncate) != 1:
        return None
    ((column, cut),) = prompt.truncate.items()
    places = list(Formatter().parse(prompt.template or ""))
    if sum(name == column for _, name, *_ in places) > 1:
        return None
    if cut == "end" and places[-1][1] == column:
        return cut
    is_first = places[0][0] == "" and places[0][1] == column and not prompt.system
    return cut if cut == "start" and is_first else None


def _kept(num: int, cut: Cut) -> tuple[int, int]:
    """How many of `num` characters or tokens are kept at the start and at the end."""
    return {"end": (num, 0), "start": (0, num), "middle": (num - num // 2, num // 2)}[cut]


def _cut(text: str | None, spans: Int64s, num: int, cut: Cut) -> str | None:
    """The text of `num` of its tokens, of which the places are `spans`."""
    if text is None or num >= len(spans):
        return text
    head, tail = _kept(num, cut)
    end = int(spans[head - 1][1]) if head else 0
    begin = int(spans[len(spans) - tail][0]) if tail else len(text)
    return text[:end] + text[max(begin, end) :]


def _with_texts(rows: pa.RecordBatch, texts: Mapping[str, Sequence[str | None]]) -> pa.RecordBatch:
    """Rows with other texts in some columns."""
    columns = {name: rows.column(name) for name in rows.schema.names}
    columns |= {name: pa.array(values, pa.large_string()) for name, values in texts.items()}
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def sample_tokens(spec: JobSpec, tokenizer: Tokenizer) -> TokenTable:
    """The prompt of a made-up row; none if the chat template refuses it."""
    try:
        sample = tokenizer.renderer(spec.prompt).render(sample_chat(spec.prompt))
        return tokenizer.encode(sample.present())
    except ChatRefusedError:
        return TokenTable.from_lists([])


def warn_of_doubled_start(spec: JobSpec, tokens: TokenTable, tokenizer: Tokenizer) -> None:
    """Warn, with the cure, if one of the first prompts begins with a control token twice.

    With adapters, `tokens` may have their classes.
    """
    for number in range(min(len(tokens), _MOST_PROMPTS)):
        start = [token_id % tokenizer.vocabulary_bound for token_id in tokens.prompt(number)[:2]]
        token = tokenizer.decode(start[:1])
        if start == start[:1] * 2 and token in tokenizer.control_tokens.special:
            whose = "tokenizer adds one"
            if spec.prompt.chat_template:
                whose = "chat template adds one (or both: then correct that)"
            _log.warning(
                "prompts begin with %s twice, which the model has never seen: its %s;"
                " leave it out of prompt.%s, of prompt.system, and of the columns that come first",
                token,
                whose,
                spec.prompt.field,
            )
            return
