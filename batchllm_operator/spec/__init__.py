"""The job spec: input, prompt, model and output of a job. Untrusted input enters here."""

from batchllm_operator.spec.addresses import CLOUD_SCHEMES as CLOUD_SCHEMES
from batchllm_operator.spec.addresses import TableAddress as TableAddress
from batchllm_operator.spec.addresses import check_folder as check_folder
from batchllm_operator.spec.conditions import Comparison as Comparison
from batchllm_operator.spec.conditions import FilterTerm as FilterTerm
from batchllm_operator.spec.execution import EngineSpec as EngineSpec
from batchllm_operator.spec.execution import LimitsSpec as LimitsSpec
from batchllm_operator.spec.fields import Decides as Decides
from batchllm_operator.spec.loading import load_spec as load_spec
from batchllm_operator.spec.loading import parse_spec as parse_spec
from batchllm_operator.spec.loading import parse_spec_json as parse_spec_json
from batchllm_operator.spec.model import JobSpec as JobSpec
from batchllm_operator.spec.prompt import PromptSpec as PromptSpec
from batchllm_operator.spec.prompt import template_columns as template_columns
from batchllm_operator.spec.response_format import ChoiceFormat as ChoiceFormat
from batchllm_operator.spec.response_format import JsonSchemaFormat as JsonSchemaFormat
from batchllm_operator.spec.response_format import RegexFormat as RegexFormat
from batchllm_operator.spec.response_format import ResponseFormat as ResponseFormat
from batchllm_operator.spec.response_format import matcher as matcher
from batchllm_operator.spec.sections import TARGET_FILE_BYTES as TARGET_FILE_BYTES
from batchllm_operator.spec.sections import InputSpec as InputSpec
from batchllm_operator.spec.sections import ModelSpec as ModelSpec
from batchllm_operator.spec.sections import OutputSpec as OutputSpec
from batchllm_operator.spec.sections import SamplingSpec as SamplingSpec
