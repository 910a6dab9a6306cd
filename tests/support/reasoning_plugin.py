"""A reasoning parser for vLLM whose marks are tokens that the demo's model writes now and then."""

from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser


@ReasoningParserManager.register_module("demo")
class DemoReasoningParser(BaseThinkingReasoningParser):
    """All before the first mark is reasoning; a thinking model is one with `enable_thinking`."""

    start_token = "#"
    end_token = "/"

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._thinks = (kwargs.get("chat_template_kwargs") or {}).get("enable_thinking", True)

    def adjust_request(self, request: Any) -> Any:
        request.skip_special_tokens = False
        return request

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        if not self._thinks:
            return None, model_output
        return super().extract_reasoning(model_output, request)
