#!/usr/bin/env bash
# Measure on a machine with a GPU, possibly without a network, which may be bare again at the next
# call: checks, the attention kernel, its settings, whether outputs agree with stock vLLM's, and the
# paper's workloads through vLLM. Each step has a time limit of its own; one that fails is
# recorded, and the next one runs.
#
#   on_gpu.sh OUT [SITE]
#
# OUT gets one archive, on_gpu.tar.gz, after each step and at the end, also of a call that fails or
# is stopped (SIGTERM, SIGINT): NAME.json and NAME.log of each step, and steps.jsonl with a line for
# each. A call begins with the archive of the last one: steps that went well with the same code and
# arguments aren't run again; agreement and end-to-end steps keep what they have. SITE is a folder
# with vLLM and what it needs beside torch (pip install --target), if the interpreter has none of
# its own; its bytecode is compiled once. Ends with 1 if any step failed or had no time left, with
# 143 or 130 if it was stopped. Settings (environment):
#   CALL         1 or 2: the steps and limits of that call, as in README.md
#   STEPS        names of the steps to run, in this order; the last gets all the time that is left.
#                Without CALL all but case_1, case_1_variants, degree_16, profile_stock, profile_ours
#   FROM         archive of the last call; OUT/on_gpu.tar.gz by default, if it is there
#   CACHE        folder for compiled code, not in OUT; batchllm-on-gpu-UID in TMPDIR by default
#   PYTHON       python3
#   KERNEL_ARGS  more arguments for benchmarks.kernel, such as "--without fa3"
#   TUNE_ARGS    arguments for kernel_settings.tune; heads of 128 and 16-bit KV by default
#   E2E_ARGS     more arguments for benchmarks.end_to_end, such as "--workloads case_1"
#   MODEL        of all steps with an engine; Mistral-7B by default; tiny rehearses them, on a CPU
#   TOTAL_S      seconds for everything; 530 by default
#   *_S          most seconds of a step: IMPORTS_S, QUICK_S, TUNE_S, KERNEL_S, AGREEMENT_S, E2E_S
#                (case_1, case_1_variants, degree_16, end_to_end), PROFILE_S
#   LEAST_S      a step that would get less isn't begun; 30
set -uo pipefail
out=${1:?usage: on_gpu.sh OUT [SITE]} site=${2:-}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3} model=${MODEL:-Mistral-7B} total_s=${TOTAL_S:-530}
case ${CALL:-} in
  1) default_steps='imports quick tune case_1' limits=(45 90 120 350 130) ;;
  2) default_steps='case_1_variants agreement degree_16' limits=(45 90 120 260 130) ;;
  '') default_steps='imports quick agreement end_to_end kernel tune' limits=(120 120 300 540 300) ;;
  *) echo "CALL=$CALL: must be 1 or 2" >&2 && exit 2 ;;
esac
imports_s=${IMPORTS_S:-${limits[0]}} quick_s=${QUICK_S:-${limits[1]}} tune_s=${TUNE_S:-${limits[2]}}
e2e_s=${E2E_S:-${limits[3]}} agreement_s=${AGREEMENT_S:-${limits[4]}}
least_s=${LEAST_S:-30} kernel_s=${KERNEL_S:-480} profile_s=${PROFILE_S:-200}
read -ra steps <<<"${STEPS:-$default_steps}"
read -ra kernel_args <<<"${KERNEL_ARGS:-}"
read -ra tune_args <<<"${TUNE_ARGS:---step launch --head-dim 128 --kv-bits 16}"
read -ra e2e_args <<<"${E2E_ARGS:-}"
known_steps=' imports quick kernel tune case_1 case_1_variants degree_16 end_to_end agreement
  profile_stock profile_ours '
for name in "${steps[@]}"; do
  [[ $known_steps =~ [[:space:]]$name[[:space:]] ]] && continue
  echo "STEPS: there is no step $name" >&2 && exit 2
done
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
[[ -z $site ]] || site=$(cd "$site" && pwd) || exit 2
cache=${CACHE:-${TMPDIR:-/tmp}/batchllm-on-gpu-$(id -u)}
mkdir -p "$cache" && cache=$(cd "$cache" && pwd) || exit 2
[[ $cache/ != "$out"/* ]] || { echo "CACHE must not be in $out" >&2 && exit 2; }

work=$(mktemp -d) failed=0 running=
results=$work/results archive=$out/on_gpu.tar.gz
pack() { # All results so far; the last archive stays until this one is whole.
  tar -czf "$archive.new" -C "$results" . && mv "$archive.new" "$archive" || failed=1
}
finish() { # EXIT CODE: pack in any case
  trap '' TERM INT
  pack
  rm -rf "$work"
  exit "$(($1 > failed ? $1 : failed))"
}
stop() { # EXIT CODE: timeout(1) passes the signal on to the step
  trap '' TERM INT
  [[ -z $running ]] || { kill -TERM "$running" && wait "$running"; }
  exit "$1"
}
mkdir "$results"
from=${FROM:-}
[[ -n $from || ! -e $archive ]] || from=$archive
[[ -z $from ]] || tar -xzf "$from" -C "$results" || { rm -rf "$work" && exit 2; }
trap 'finish $?' EXIT
trap 'stop 143' TERM
trap 'stop 130' INT

# The packages alone: with the repository itself on the path, transformers would find its folder
# kernels/ and take it for the package of that name.
mkdir "$work/packages"
for package in batchllm_operator benchmarks kernels/batchllm_kernels scripts/kernel_settings; do
  ln -s "$root/$package" "$work/packages/"
done
export PYTHONPATH="$work/packages${site:+:$site}"
unset PYTHONDONTWRITEBYTECODE # without bytecode each import of vLLM takes half a minute
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
export VLLM_USE_DEEP_GEMM=${VLLM_USE_DEEP_GEMM:-0} HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export VLLM_HOST_IP=${VLLM_HOST_IP:-127.0.0.1}
GIT_SHA=${GIT_SHA:-$(git -C "$root" rev-parse HEAD 2>/dev/null)}
export GIT_SHA
# Compiled code, found again by every engine that starts.
export VLLM_CACHE_ROOT="$cache/vllm" TRITON_CACHE_DIR="$cache/triton"
export NUMBA_CACHE_DIR="$cache/numba" TORCHINDUCTOR_CACHE_DIR="$cache/inductor"
cd "$root" || exit 2
if [[ -n $site && ! -e $site/.bytecode ]]; then
  "$python" -m compileall -q -j 0 "$site" >"$results/compileall.log" 2>&1 # some are templates
  touch "$site/.bytecode"
fi
code=$("$python" -P -c 'from benchmarks.provenance import code_digest; print(code_digest())') || exit 2

left() { # SECONDS: at most so many, and at most what is left; all of it for the last step
  local rest=$((total_s - SECONDS - 15)) # to end a step that hangs, and to pack
  if [[ $1 -gt $rest || $name == "${steps[-1]}" ]]; then echo "$rest"; else echo "$1"; fi
}
step() { # SECONDS COMMAND...: step `name`
  local limit begin=$SECONDS rc=0 command known
  limit=$(left "$1")
  shift
  # Without what differs from call to call: the interpreter's path, folders, the time that is left.
  command=${*:2}
  command=$(sed -E 's/--budget-s [0-9-]+//' <<<"${command//"$work"/}" | cksum | cut -d ' ' -f 1)
  known="{\"step\": \"$name\", \"code\": \"$code\", \"command\": $command"
  if grep -qF "$known, \"rc\": 0," "$results/steps.jsonl"; then
    echo "== $name: done before"
    return
  fi
  if ((limit < least_s)); then
    echo "== $name: no time is left"
    failed=1
    return
  fi
  echo "== $name: at most $limit s"
  timeout --kill-after=10 "$limit" "$@" >"$results/$name.log" 2>&1 &
  running=$!
  wait "$running" || rc=$?
  running=
  printf '%s, "rc": %d, "seconds": %d, "limit_s": %d}\n' \
    "$known" "$rc" "$((SECONDS - begin))" "$limit" >>"$results/steps.jsonl"
  ((rc == 0)) || failed=1
  tail -n 12 "$results/$name.log" | cut -c 1-400 # 124: it ran past its limit
  echo "== $name: exit code $rc"
  pack
}
end_to_end() { # ARGUMENTS: rows of all calls lie together, and each report has all of them
  step "$e2e_s" "$python" -P -m benchmarks.end_to_end --out "$results/end_to_end" --model "$model" \
    --budget-s "$(($(left "$e2e_s") - 15))" --json "$results/end_to_end.json" "$@"
}
profile_steps() { # POLICY
  step "$profile_s" "$python" -P -m benchmarks.end_to_end.profile_steps "$1" case_1 \
    --model "$model" --json "$results/$name.json"
}
kernel() { # SECONDS ARGUMENTS
  step "$1" "$python" -P -m benchmarks.kernel --adjacent --json "$results/$name.json" \
    --budget-s "$(($(left "$1") * 9 / 10))" "${@:2}" "${kernel_args[@]}"
}
imports='import torch, triton, vllm
from benchmarks.kernel_timing import copy_bytes_per_s
print(torch.__version__, triton.__version__, vllm.__version__)
for i in range(torch.cuda.device_count()):
    copied = copy_bytes_per_s(torch.device("cuda", i))
    print(f"{torch.cuda.get_device_name(i)}: copies {copied / 1e12:.2f} TB/s")'

: >>"$results/steps.jsonl"
for name in "${steps[@]}"; do
  case $name in
    imports) step "$imports_s" "$python" -P -c "$imports" ;;
    quick) # a fault in that baseline would spoil the process
      kernel "$quick_s" --quick --without triton_unified ;;
    kernel) kernel "$kernel_s" ;;
    tune) # what it finds is brought home, not used here
      step "$tune_s" "$python" -P -m kernel_settings.tune "${tune_args[@]}" \
        --budget-s "$(($(left "$tune_s") * 3 / 4))" --out "$results/tuned.json" \
        --json "$results/tune.json" ;;
    case_1)
      end_to_end --workloads case_1 --policies stock_sorted batchllm --settings default ;;
    case_1_variants)
      end_to_end --workloads case_1 --policies batchllm_stock_attention batchllm_graphs \
        --settings default ;;
    degree_16)
      end_to_end --workloads micro_2000_200_degree_16 --policies stock_sorted batchllm \
        --settings default ;;
    end_to_end) end_to_end "${e2e_args[@]}" ;;
    agreement)
      step "$agreement_s" "$python" -P -m benchmarks.end_to_end.agreement \
        --out "$results/agreement" --model "$model" --json "$results/agreement.json" ;;
    profile_stock) profile_steps stock_sorted ;;
    profile_ours) profile_steps batchllm ;;
  esac
done
exit "$failed"
