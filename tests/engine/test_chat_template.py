"""What a chat template is given follows vLLM's own rules."""

import inspect
from pathlib import Path

import pytest
from e2e.test_chat import BY_PARTS, BY_TEXT

from batchllm_operator.model.chat_template import takes_parts

hf = pytest.importorskip("vllm.renderers.hf")

LOOP = "{% for m in messages %}"
END = "{% endfor %}"
TEMPLATES = [
    *("", "{{ messages }}", "{% broken", BY_TEXT, BY_PARTS),
    f"{LOOP}{{% for c in m.content %}}{{{{ c.text }}}}{END}{END}",
    f"{LOOP}{{% for c in m['content'] | list %}}{{{{ c.text }}}}{END}{END}",
    f"{LOOP}{{% for c in m['text'] %}}{{{{ c }}}}{END}{END}",
    f"{LOOP}{{% set content = m.content %}}{{% for c in content %}}{{{{ c }}}}{END}{END}",
    f"{LOOP}{{% set parts = m.content %}}{{% for c in parts %}}{{{{ c }}}}{END}{END}",
    "{% set a = messages[1:] %}{% set b = a %}{% for m in b | list %}{% for c in m.content %}"
    "{{ c }}{% endfor %}{% endfor %}",
    "{% set a = other %}{% for m in a %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
    "{% for c in messages[0].content %}{{ c }}{% endfor %}",
    f"{LOOP}{{% generation %}}{{% for c in m.content[1:] %}}{{{{ c }}}}{{% break %}}{END}"
    f"{{% endgeneration %}}{END}",
]
MACRO = "{% macro show(a, content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}"
MACROS = [
    f"{MACRO}{LOOP}{{{{ show(1, m.content) }}}}{END}",
    f"{MACRO}{LOOP}{{{{ show(content=m.content) }}}}{END}",
    f"{MACRO}{LOOP}{{{{ show(m.content, 1) }}}}{END}",
    f"{MACRO}{LOOP}{{{{ show(1, m.tools) }}}}{END}",
]


def check(template: str) -> None:
    assert takes_parts(template) == (
        hf._detect_content_format(template, default="string") == "openai"
    )


@pytest.mark.parametrize("template", TEMPLATES)
def test_parts_are_given_where_vllm_gives_them(template: str) -> None:
    check(template)


@pytest.mark.skipif(
    "Macro" not in inspect.getsource(hf._iter_nodes_assign_content_item),
    reason="this vLLM doesn't look into macros",
)
@pytest.mark.parametrize("template", MACROS)
def test_parts_are_given_to_macros(template: str) -> None:
    check(template)


def test_vllms_own_templates() -> None:
    found = list(Path(inspect.getfile(hf)).parents[1].glob("**/*.jinja"))
    assert found
    for path in found:
        check(path.read_text())
