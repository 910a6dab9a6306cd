#!/usr/bin/env bash
# Unpack the Python sources of the newest vLLM, which has no CPU build, into build/newest-vllm: in front of .venv's own vLLM on
# PYTHONPATH they run what needs no compiled code.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lock=requirements/newest-vllm.lock out=build/newest-vllm

[[ ! -e $out.lock ]] || ! cmp -s "$lock" "$out.lock" || exit 0
rm -rf "$out" "$out.lock" "$out.wheel"
.venv/bin/python -m pip download -qq --no-cache-dir --no-deps --require-hashes -d "$out.wheel" -r "$lock"
.venv/bin/python - "$out" "$out".wheel/*.whl <<'END'
import sys, zipfile

with zipfile.ZipFile(sys.argv[2]) as wheel:
    names = [name for name in wheel.namelist() if name.endswith(".py") or ".dist-info/" in name]
    wheel.extractall(sys.argv[1], names)
END
rm -r "$out.wheel"
cp "$lock" "$out.lock"
