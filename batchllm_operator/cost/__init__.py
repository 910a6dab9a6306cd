"""Predicts the GPU time of requests with a model, by a roofline."""

from batchllm_operator.cost.gpu import GPU as GPU
from batchllm_operator.cost.gpu import find_gpu as find_gpu
from batchllm_operator.cost.gpu import read_gpu_table as read_gpu_table
from batchllm_operator.cost.model_shape import MODEL_SHAPES as MODEL_SHAPES
from batchllm_operator.cost.model_shape import ModelShape as ModelShape
from batchllm_operator.cost.model_shape import model_shape as model_shape
from batchllm_operator.cost.roofline import BLOCK_SIZE as BLOCK_SIZE
from batchllm_operator.cost.roofline import EngineLimits as EngineLimits
from batchllm_operator.cost.roofline import Prediction as Prediction
from batchllm_operator.cost.roofline import Work as Work
from batchllm_operator.cost.roofline import WorkArrays as WorkArrays
from batchllm_operator.cost.roofline import kv_capacity_tokens as kv_capacity_tokens
from batchllm_operator.cost.roofline import predict as predict
from batchllm_operator.cost.roofline import prompt_work as prompt_work
from batchllm_operator.cost.roofline import rates as rates
from batchllm_operator.cost.step_time import AttentionRates as AttentionRates
from batchllm_operator.cost.step_time import StepWork as StepWork
from batchllm_operator.cost.step_time import attention_kernels as attention_kernels
from batchllm_operator.cost.step_time import matrix_seconds as matrix_seconds
from batchllm_operator.cost.step_time import step_seconds as step_seconds
