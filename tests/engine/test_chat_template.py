"""A chat template is given parts of contents where vLLM gives them."""

import inspect
from pathlib import Path

import pytest
from e2e.test_chat import BY_PARTS, BY_TEXT
from tokenizers import Tokenizer, models

from batchllm_operator.model import ChatTemplate
from batchllm_operator.spec import PromptSpec

hf = pytest.importorskip("vllm.renderers.hf")

LOOP = "{% for m in messages %}"
END = "{% endfor %}"
MACRO = "{% macro show(a, content) %}{% for c in content %}{{ c.text }}{% endfor %}{% endmacro %}"
TEMPLATES = [
    *("{{ messages }}", "{% broken", BY_TEXT, BY_PARTS),
    f"{LOOP}{{{{ m.content | trim }}}}{END}",
    f"{LOOP}{{% for c in m.content %}}{{{{ c.text }}}}{END}{END}",
    f"{LOOP}{{% for c in m['content'] | list %}}{{{{ c.text }}}}{END}{END}",
    f"{LOOP}{{% set content = m.content %}}{{% for c in content %}}{{{{ c.text }}}}{END}{END}",
    f"{LOOP}{{% generation %}}{{% for c in m.content %}}{{{{ c.text }}}}{{% break %}}{END}"
    f"{{% endgeneration %}}{END}",
]


def check(template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({}, "?")), chat_template=template
    )
    chat = ChatTemplate(tokenizer, "a model", "2026-01-31", PromptSpec(template="{x}"))
    given = hf._detect_content_format(template, default="string")
    assert chat.takes_parts == (given == "openai")


@pytest.mark.parametrize("template", TEMPLATES)
def test_parts_are_given_where_vllm_gives_them(template: str) -> None:
    check(template)


@pytest.mark.skipif(
    "Macro" not in inspect.getsource(hf._iter_nodes_assign_content_item),
    reason="this vLLM doesn't look into macros",
)
@pytest.mark.parametrize(
    "call", ["1, m.content", "content=m.content", "m.content, 1", "1, m.tools"]
)
def test_parts_are_given_to_macros(call: str) -> None:
    check(f"{MACRO}{LOOP}{{{{ show({call}) }}}}{END}")


def test_vllms_own_templates() -> None:
    found = list(Path(inspect.getfile(hf)).parents[1].glob("**/*.jinja"))
    assert found
    for path in found:
        check(path.read_text())
