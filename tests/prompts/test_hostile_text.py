"""Text of rows in a chat template, and chat templates of models: neither can do anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from prompts.test_tokenizer import CHAT_TEMPLATE, END, START, build_tokenizer, ids_of, job

from batchllm_operator.errors import ModelError

HOSTILE = [
    *("{{ 7 * 7 }}", "{% for x in messages %}{{ x }}{% endfor %}", "{# gone #}", "{{ messages }}"),
    *("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{doc}", "{0.__class__}", "%(doc)s"),
    *("${HOME}", "$(id)", "`id`", "'; DROP TABLE t; --", "</s>", "\u202e"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("model"))


def test_a_chat_template_places_the_text_of_a_row_and_does_not_read_it(model: Path) -> None:
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(model)
    system = "\n".join(HOSTILE)
    spec = job(model, chat_template=True, system=system)
    for text, ids in zip(HOSTILE, ids_of(spec, HOSTILE), strict=True):
        expected = f"{START}system\n{system}{END}\n{START}user\n{text}{END}\n{START}assistant\n"
        assert own.decode(ids) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__init__.__globals__",
        "cycler.__init__.__globals__.os.popen('id').read()",
        "messages.append(1)",
    ],
)
def test_a_models_chat_template_runs_in_a_sandbox(tmp_path: Path, expression: str) -> None:
    template = CHAT_TEMPLATE + "{{ " + expression + " }}"
    folder = build_tokenizer(tmp_path / "model", chat_template=template)
    with pytest.raises(ModelError, match="its chat template refuses the prompt"):
        ids_of(job(folder, chat_template=True), ["text"])
