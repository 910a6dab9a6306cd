"""The job spec: what a job reads, asks, runs and writes. Untrusted input enters here."""

from batchllm_operator.spec.addresses import TableAddress, check_folder
from batchllm_operator.spec.loading import load_spec, parse_spec, parse_spec_json
from batchllm_operator.spec.masking import MaskedStream, Masker
from batchllm_operator.spec.model import (
    OUTPUT_COLUMNS,
    ROUNDING_ENGINE_FIELDS,
    SPEC_VERSION,
    TARGET_FILE_BYTES,
    EngineSpec,
    FilterTerm,
    InputSpec,
    JobSpec,
    ModelSpec,
    OutputEstimate,
    OutputSpec,
    PlannerSpec,
    PromptSpec,
    SamplingSpec,
    template_columns,
)
from batchllm_operator.spec.secrets import holds_credentials

__all__ = [
    "OUTPUT_COLUMNS",
    "ROUNDING_ENGINE_FIELDS",
    "SPEC_VERSION",
    "TARGET_FILE_BYTES",
    "EngineSpec",
    "FilterTerm",
    "InputSpec",
    "JobSpec",
    "MaskedStream",
    "Masker",
    "ModelSpec",
    "OutputEstimate",
    "OutputSpec",
    "PlannerSpec",
    "PromptSpec",
    "SamplingSpec",
    "TableAddress",
    "check_folder",
    "holds_credentials",
    "load_spec",
    "parse_spec",
    "parse_spec_json",
    "template_columns",
]
