"""What prompts take from answers to others, and the rounds that follow from it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from batchllm_operator.spec.question import QuestionSpec

_HEAD: Final = re.compile(r"([^.\[]*)(?:\.([^.\[]+))?")
"""The first name of a place, and a field of it."""

Prompts = Mapping[str, "QuestionSpec"]


def answers_named(prompt: QuestionSpec, prompts: Collection[str]) -> dict[str, str]:
    """The places in a prompt's template and condition that are answers, each with its prompt.

    `summary` is the answer to that prompt, `summary.status` a field of its output column.
    """
    places = dict.fromkeys((*prompt.columns, *compared(prompt)))
    heads = {place: _parts(place)[0] for place in places}
    return {place: head for place, head in heads.items() if head in prompts}


def compared(prompt: QuestionSpec) -> list[str]:
    """Columns in its condition."""
    return [each.column for term in prompt.when for each in term.comparisons]


def sources_of(prompts: Prompts) -> dict[str, tuple[str, ...]]:
    """Input columns that answers are made of, by prompt; raises as `rounds_of`."""
    made: dict[str, tuple[str, ...]] = {}
    for name in chain.from_iterable(rounds_of(prompts)):
        prompt = prompts[name]
        answers = answers_named(prompt, prompts)
        named = (*prompt.columns, *compared(prompt))
        columns = (made[answers[each]] if each in answers else (each,) for each in named)
        made[name] = tuple(dict.fromkeys(chain.from_iterable(columns)))
    return made


def rounds_of(prompts: Prompts) -> list[tuple[str, ...]]:
    """Names of prompts by round: answers that one needs are those of rounds before.

    Raises `CycleError`, with the names.
    """
    needs = {name: answers_named(prompt, prompts).values() for name, prompt in prompts.items()}
    sorter, rounds = TopologicalSorter(needs), []
    sorter.prepare()
    while sorter.is_active():
        ready = sorter.get_ready()
        rounds.append(tuple(sorted(ready)))
        sorter.done(*ready)
    return rounds


def faults_of(prompts: Prompts, columns: Mapping[str, Collection[str]]) -> Iterator[str]:
    """What is wrong with the answers that prompts name; `columns` are those of each answer."""
    for name, prompt in prompts.items():
        for place in answers_named(prompt, prompts):
            head, field = _parts(place)
            if place != head and field not in columns[head]:
                yield (
                    f"prompts.{name}: answers to {head} have no {place.removeprefix(head)}; they"
                    f" have {', '.join(columns[head])}"
                )
        for column in compared(prompt):
            head, field = _parts(column)
            if field and head not in prompts:
                yield (
                    f"prompts.{name}.when: there is no prompt {head!r} whose {field} could be"
                    f" compared; there are {', '.join(prompts)}"
                )
    try:
        rounds_of(prompts)
    except CycleError as error:
        circle = " needs ".join(reversed(error.args[1]))
        yield (
            f"prompts: {circle}: an answer has to come before the prompts that name it; give a"
            " prompt another name if a column of the input is meant"
        )


def _parts(place: str) -> tuple[str, str | None]:
    match = _HEAD.match(place)
    assert match is not None, place
    return match[1], match[2]
