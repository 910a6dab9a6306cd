"""Takes a model's reasoning and its answer apart, as vLLM's chat server does."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams

from batchllm_operator.engine.arguments import unknown_parser
from batchllm_operator.engine.vllm.logs import one_line
from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec


def choose_parser(name: str | None, config: Any) -> None:
    """Set vLLM's parser, so that grammars begin where the reasoning ends.

    Not by its argument `reasoning_parser`, which turns on budgets of thinking, too.

    Args:
        name: see `ModelSpec.reasoning_parser`.
        config: vLLM's, which is changed.

    Raises:
        SpecError: there is no such parser.
    """
    if name is None:
        return
    from vllm.reasoning import ReasoningParserManager

    outputs = config.structured_outputs_config
    if outputs.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(outputs.reasoning_parser_plugin)
    if name not in (known := ReasoningParserManager.list_registered()):
        raise SpecError(unknown_parser(name, known))
    outputs.reasoning_parser = name


class ReasoningSplitter:
    """vLLM's reasoning parser for a model.

    Args:
        spec: the job's, with a `model.reasoning_parser`.
        engine: vLLM's.

    Raises:
        SpecError: the parser doesn't suit the model.
    """

    def __init__(self, spec: JobSpec, engine: Any) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager

        config = engine.vllm_config.model_config
        name = spec.model.reasoning_parser
        self._arguments = {
            "chat_template_kwargs": spec.prompt.chat_arguments,
            "model_config": config,
        }
        self._tokenizer = engine.tokenizer
        request = ChatCompletionRequest.model_validate(
            {"messages": [{"role": "user", "content": ""}]}
        )
        try:
            self._kind: Any = ParserManager.get_parser(
                reasoning_parser_name=name, is_harmony=config.hf_config.model_type == "gpt_oss"
            )
            self._request: Any = self._parser().adjust_request(request)
        # Parsers look for their tokens in the vocabulary, each with errors of its own.
        except Exception as error:
            raise SpecError(
                f"model.reasoning_parser: vLLM's {name!r} doesn't suit this model:"
                f" {one_line(error)}"
            ) from error

    def adjust(self, params: SamplingParams) -> None:
        """Keep in the text of `params` what the parser reads, such as special tokens."""
        params.skip_special_tokens = self._request.skip_special_tokens
        params.spaces_between_special_tokens = self._request.spaces_between_special_tokens

    def split(self, prompt_token_ids: list[int], completion: Any) -> tuple[str | None, str]:
        """The reasoning, if there is any, and the answer.

        Args:
            prompt_token_ids: of the request.
            completion: vLLM's, finished.
        """
        parser = self._parser()  # it has state
        if hasattr(parser, "set_prompt_token_ids"):  # since vLLM 0.28 or later
            parser.set_prompt_token_ids(prompt_token_ids)
        reasoning, answer, _ = parser.parse(
            completion.text, self._request, model_output_token_ids=completion.token_ids
        )
        return reasoning, answer or ""

    def _parser(self) -> Any:
        return self._kind(self._tokenizer, None, **self._arguments)
