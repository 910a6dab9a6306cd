"""What a process imports that starts vLLM, for the server that forks such processes."""

import gc
import os
from contextlib import suppress
from importlib import import_module

# Read by torch when it is imported. More threads than cores only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

for _name in ("batchllm_operator.run.run_shards", "batchllm_operator.engine.vllm.engine"):
    import_module(_name)
# What vLLM imports when it starts: it starts without these as well.
for _name in (
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
    "vllm.renderers.hf",
    "compressed_tensors.compressors",
):
    with suppress(ImportError):
        import_module(_name)

# An engine that ends would look through all of these for what can be freed: for two seconds.
gc.unfreeze = lambda: None
