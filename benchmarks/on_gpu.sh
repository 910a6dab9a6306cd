#!/usr/bin/env bash
# Measure on a machine with a GPU, possibly without a network: checks, the attention kernel, its
# settings, whether outputs agree with stock vLLM's, and the paper's workloads through vLLM. Each
# step has a time limit of its own; one that fails is recorded, and the next one runs.
#
#   on_gpu.sh OUT [SITE]
#
# OUT gets NAME.json and NAME.log of each step, and steps.jsonl with a line for each. With the same
# OUT and the same code the same command goes on where it was cut off: steps that went well aren't
# run again, and end_to_end and agreement keep what they have. SITE is a
# folder with vLLM and what it needs beside torch (pip install --target), if the interpreter has
# none of its own. Ends with 1 if any step failed. Settings (environment):
#   STEPS        names of the steps to run, in their order; all by default
#   PYTHON       python3
#   KERNEL_ARGS  more arguments for benchmarks.kernel, such as "--without fa3"
#   TUNE_ARGS    more arguments for batchllm_kernels.tune
#   E2E_ARGS     more arguments for benchmarks.end_to_end, such as "--workloads case_1"
#   MODEL        of agreement, end_to_end and profile_*; Mistral-7B by default; tiny rehearses
#                them without a GPU
#   TOTAL_S      seconds for everything; 3000 by default
#   *_S          seconds: CHECK_S (imports, tests, quick), KERNEL_S, TUNE_S, AGREEMENT_S, E2E_S,
#                PROFILE_S (each)
set -uo pipefail
out=${1:?usage: on_gpu.sh OUT [SITE]} site=${2:-}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
steps=${STEPS:-imports tests quick agreement end_to_end kernel tune profile_stock profile_ours}
model=${MODEL:-Mistral-7B}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
[[ -z $site ]] || site=$(cd "$site" && pwd) || exit 2

# The packages alone: with the repository itself on the path, transformers would find its folder
# kernels/ and take it for the package of that name.
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
for package in batchllm_operator benchmarks kernels/batchllm_kernels; do
  ln -s "$root/$package" "$packages/"
done
export PYTHONPATH="$packages${site:+:$site}" PYTHONDONTWRITEBYTECODE=1
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
export VLLM_USE_DEEP_GEMM=${VLLM_USE_DEEP_GEMM:-0} HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
GIT_SHA=${GIT_SHA:-$(git -C "$root" rev-parse HEAD 2>/dev/null)}
export GIT_SHA
# Compiled code, found again by every engine that starts.
export VLLM_CACHE_ROOT="$out/cache/vllm" TRITON_CACHE_DIR="$out/cache/triton"
export NUMBA_CACHE_DIR="$out/cache/numba" TORCHINDUCTOR_CACHE_DIR="$out/cache/inductor"
cd "$root" || exit 2
code=$("$python" -P -c 'from benchmarks.provenance import code_digest; print(code_digest())') || exit 2
total_s=${TOTAL_S:-3000}
left() { # SECONDS: at most so many, and at most what is left
  local rest=$((total_s - SECONDS))
  echo "$(($1 < rest ? $1 : rest))"
}

failed=0
step() { # NAME SECONDS COMMAND...
  local name=$1 limit begin=$SECONDS rc=0
  limit=$(left "$2")
  shift 2
  [[ " $steps " == *" $name "* ]] || return 0
  if grep -qF "{\"step\": \"$name\", \"code\": \"$code\", \"rc\": 0," "$out/steps.jsonl"; then
    echo "== $name: done before"
    return 0
  fi
  if ((limit < 30)); then
    echo "== $name: no time is left"
    failed=1
    return 0
  fi
  echo "== $name"
  timeout --kill-after=20 "$limit" "$@" >"$out/$name.log" 2>&1 || rc=$?
  printf '{"step": "%s", "code": "%s", "rc": %d, "seconds": %d, "limit_s": %d}\n' \
    "$name" "$code" "$rc" "$((SECONDS - begin))" "$limit" >>"$out/steps.jsonl"
  ((rc == 0)) || failed=1
  tail -n 12 "$out/$name.log" | cut -c 1-400 # 124: it ran past its limit
  echo "== $name: exit code $rc"
}
read -ra kernel_args <<<"${KERNEL_ARGS:-}"
read -ra tune_args <<<"${TUNE_ARGS:-}"
read -ra e2e_args <<<"${E2E_ARGS:-}"

imports='import torch, triton, vllm
print(torch.__version__, triton.__version__, vllm.__version__)
print([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])'
kernel_s=${KERNEL_S:-480} e2e_s=${E2E_S:-540}
profile_steps() { # NAME POLICY
  step "$1" "${PROFILE_S:-200}" "$python" -P -m benchmarks.end_to_end.profile_steps "$2" case_1 \
    --model "$model" --json "$out/$1.json"
}

: >>"$out/steps.jsonl"
step imports "${CHECK_S:-200}" "$python" -P -c "$imports"
step tests "${CHECK_S:-200}" "$python" -P -m pytest -p no:cacheprovider -q tests/kernels
step quick "${CHECK_S:-200}" "$python" -P -m benchmarks.kernel --quick --json "$out/quick.json" \
  "${kernel_args[@]}"
step agreement "${AGREEMENT_S:-400}" "$python" -P -m benchmarks.end_to_end.agreement \
  --out "$out/agreement" --model "$model" --json "$out/agreement.json"
step end_to_end "$e2e_s" "$python" -P -m benchmarks.end_to_end --out "$out/end_to_end" \
  --model "$model" --budget-s "$(($(left "$e2e_s") - 80))" --json "$out/end_to_end.json" "${e2e_args[@]}"
step kernel "$kernel_s" "$python" -P -m benchmarks.kernel --json "$out/kernel.json" \
  --budget-s "$(($(left "$kernel_s") * 9 / 10))" "${kernel_args[@]}"
step tune "${TUNE_S:-480}" "$python" -P -m batchllm_kernels.tune "${tune_args[@]}"
profile_steps profile_stock stock_sorted
profile_steps profile_ours batchllm
exit "$failed"
