"""The tokens of labels: those with which a model begins its answers."""

from __future__ import annotations

from batchllm_operator.errors import SpecError
from batchllm_operator.prompts import Tokenizer, renderer_of, sample_chat
from batchllm_operator.spec import JobSpec


def find_label_tokens(spec: JobSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The first token of each label's answer, in the order of `spec.labels`; none without a task.

    It depends on the end of the prompt, which is the template's unless a column comes last.

    Raises:
        SpecError: two answers begin with the same token, or one has none.
    """
    if not spec.labels:
        return ()
    some = renderer_of(spec.prompt).render(sample_chat(spec.prompt))
    sample = tokenizer.apply_chat_template(some)
    for error in sample.errors.values():
        raise SpecError(f"labels: can't be tried after a message of a user: {error}")
    (prompt,) = sample.present()
    answers = list(spec.labels.values())
    known: dict[int, str] = {}
    for (label, answer), token_id in zip(
        spec.labels.items(), tokenizer.answer_tokens(prompt, answers), strict=True
    ):
        if token_id is None:
            raise SpecError(f"labels: the tokenizer makes no tokens of {label!r} ({answer!r})")
        if (other := known.setdefault(token_id, label)) != label:
            raise SpecError(
                f"labels: {other!r} and {label!r} begin with the same token"
                f" ({tokenizer.decode([token_id])!r}) under this model's tokenizer, so one step"
                " can't tell them apart; give them answers that begin differently, such as numbers"
            )
    return tuple(known)
