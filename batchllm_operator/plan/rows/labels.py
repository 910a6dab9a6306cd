"""The tokens of labels: those by which a model gives its answers."""

from __future__ import annotations

import logging
from typing import Final

from batchllm_operator.errors import PlanError, SpecError, TableError
from batchllm_operator.lake import LakeTable, before
from batchllm_operator.prompts import Tokenizer, renderer_of, sample_chat
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.run_report import REPORT_FILE, RunReport
from batchllm_operator.stored_plan.stored_plan import StoredPlan, check_publisher, job_folder

_MOST_NAMED: Final = 5
_NUM_SHOWN_TOKENS: Final = 8
_log = logging.getLogger(__name__)


def find_label_tokens(spec: JobSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token of each label's answer, in the order of `spec.labels`; none without a task.

    It depends on the end of the prompt, which is the template's unless a column comes last.

    Raises:
        SpecError: an answer isn't one token, or two answers are the same one.
    """
    if not spec.labels:
        return ()
    some = renderer_of(spec.prompt).render(sample_chat(spec.prompt))
    sample = tokenizer.apply_chat_template(some)
    for error in sample.errors.values():
        raise SpecError(f"labels: can't be tried after a message of a user: {error}")
    (prompt,) = sample.present()
    tokens = tokenizer.answer_tokens(prompt, list(spec.labels.values()))
    _check_whole(spec, tokens, tokenizer)
    known: dict[int, str] = {}
    for label, (token_id,) in zip(spec.labels, tokens, strict=True):
        if (other := known.setdefault(token_id, label)) != label:
            raise SpecError(
                f"labels: {other!r} and {label!r} begin with the same token"
                f" ({tokenizer.decode([token_id])!r}) under this model's tokenizer, so one step"
                " can't tell them apart; give them answers that begin differently, such as numbers"
            )
    end = tokenizer.decode(tokenizer.encode([prompt]).to_lists()[0][-_NUM_SHOWN_TOKENS:])
    named = [f"{answer!r} ({label})" for label, answer in spec.labels.items()]
    more = ", ..." if len(named) > _MOST_NAMED else ""
    _log.info(
        "labels: after %r, the model's next token is judged: %s%s",
        end,
        ", ".join(named[:_MOST_NAMED]),
        more,
    )
    return tuple(known)


def warn_of_earlier_answers(spec: JobSpec, ds: str, output: LakeTable) -> None:
    """Repeat what the latest report says against the labels, if the settings are still the same.

    A plan runs no model: that of an earlier partition tells before the GPU begins.
    """
    if not spec.labels:
        return
    for earlier in (ds, *reversed(before(output.partitions(), ds))):
        try:
            found = check_publisher(output, spec, earlier)
            if found is None:
                continue
            folder = job_folder(spec, earlier).child(f"plan-{found.plan_id}")
            identity = StoredPlan.open(folder.uri).manifest.spec_identity
            report = RunReport.from_bytes(folder.read_bytes(REPORT_FILE), source=folder.uri)
        except (FileNotFoundError, PlanError, TableError):  # another job's, or none is left
            continue
        if report.answers is not None and identity == spec.identity:
            for warning in report.answers.warnings:
                _log.warning("partition %s, with these settings: %s", earlier, warning)
        return


def _check_whole(spec: JobSpec, tokens: list[list[int]], tokenizer: Tokenizer) -> None:
    """Refuse answers of several tokens: the first alone, such as `ir`, isn't the answer."""
    wrong = []
    for (label, answer), token_ids in zip(spec.labels.items(), tokens, strict=True):
        if not token_ids:
            raise SpecError(f"labels: the tokenizer makes no tokens of {label!r} ({answer!r})")
        if len(token_ids) > 1:
            pieces = " + ".join(repr(tokenizer.decode([each])) for each in token_ids)
            wrong.append(f"{label!r} is answered by {answer!r}, which is {pieces}")
    if wrong:
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise SpecError(
            f"labels: {'; '.join(wrong[:_MOST_NAMED])}{more}. One step gives the probability of one"
            " token under this model's tokenizer, so give each label an answer of one token:"
            " labels: {LABEL: ANSWER}, such as letters or numbers that the prompt asks for, or the"
            " word with a space first; or the first piece itself, if that is what should count"
        )
