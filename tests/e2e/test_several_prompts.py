"""A job of several prompts gives what a job for each gives, and computes documents once."""

from typing import Any

import pytest
from support.demo_job import Demo

PROMPTS: dict[str, Any] = {
    "summary": {
        "template": "{document}\n\nIn one sentence:",
        "sampling": {"max_tokens": 12},
    },
    "topic": {
        "template": "{document}\n\nTopic:",
        "sampling": {"max_tokens": 8},
        "response_format": {"type": "choice", "choices": ["food", "work", "travel"]},
    },
    "content": {
        "template": "{document}\n\nQuestion: {query}\nAnswer:",
        "task": "classify",
        "labels": {"yes": " Yes", "no": " No"},
    },
    "drawn": {
        "template": "{document}\n\nA question about it:",
        "sampling": {"temperature": 0.8, "seed": 5, "n": 2, "max_tokens": 6},
    },
}
NUMBERS = {"probability", "probabilities", "logit_margin", "label_mass"}
OF_PLACE = {"num_cached_tokens"}


def test_answers_are_those_of_a_job_for_each_prompt(real: Demo) -> None:
    whole = {"prompt": None, "sampling": None, "max_failed_fraction": 0.5}
    together = real.run_job("several", prompts=PROMPTS, **whole)
    num_alone = 0
    for name, fields in PROMPTS.items():
        own = ("sampling", "task", "labels", "response_format")
        changes: dict[str, Any] = {"sampling": {"max_tokens": 1}}
        changes |= {key: fields[key] for key in own if key in fields}
        prompt = {"system": None, "template": fields["template"]}
        single = real.run_job(f"single-{name}", prompt=prompt, max_failed_fraction=0.5, **changes)
        num_alone += single.report["num_computed_tokens"]
        answers = dict(
            zip(*(together.table[each].to_pylist() for each in ("snippet_id", name)), strict=True)
        )
        for row in single.table.to_pylist():
            found = answers[row["snippet_id"]]
            for column in found.keys() - OF_PLACE:
                wanted = row[column]
                if column in NUMBERS and wanted is not None:
                    wanted = pytest.approx(wanted, abs=1e-4)
                assert found[column] == wanted, (name, column)
    report = together.report
    assert report["num_computed_tokens"] < 0.6 * num_alone
    by_prompt = [prompt["num_computed_tokens"] for prompt in report["prompts"].values()]
    assert sum(by_prompt) == report["num_computed_tokens"]
    assert report["achieved_saving_ratio"] == report["planned_saving_ratio"]
