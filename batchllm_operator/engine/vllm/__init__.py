"""vLLM behind the engine protocol; no other file of `engine/` imports vLLM."""

import os

from batchllm_operator.engine.vllm.logs import configure_logs

# vLLM reads these when it is imported, which only files of this room do. The first keeps the engine
# in this process, the others keep a batch job from phoning home. A user's own setting wins.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
for _name, _value in {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Pinning threads makes an engine many times slower when cores are shared.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}.items():
    os.environ.setdefault(_name, _value)
configure_logs()
