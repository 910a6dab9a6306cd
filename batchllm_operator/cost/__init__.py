"""Predicts the GPU time of requests with a model, by a roofline."""

from batchllm_operator.cost.gpu import GPU, find_gpu, read_gpu_table
from batchllm_operator.cost.model_shape import MODEL_SHAPES, ModelShape, model_shape
from batchllm_operator.cost.roofline import (
    BLOCK_SIZE,
    EngineLimits,
    Prediction,
    Work,
    WorkArrays,
    kv_capacity_tokens,
    predict,
    prompt_work,
    rates,
)
from batchllm_operator.cost.step_time import (
    AttentionRates,
    StepWork,
    attention_kernels,
    matrix_seconds,
    step_seconds,
)

__all__ = [
    "BLOCK_SIZE",
    "GPU",
    "MODEL_SHAPES",
    "AttentionRates",
    "EngineLimits",
    "ModelShape",
    "Prediction",
    "StepWork",
    "Work",
    "WorkArrays",
    "attention_kernels",
    "find_gpu",
    "kv_capacity_tokens",
    "matrix_seconds",
    "model_shape",
    "predict",
    "prompt_work",
    "rates",
    "read_gpu_table",
    "step_seconds",
]
