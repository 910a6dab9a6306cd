#!/usr/bin/env bash
# Build the sdist, and the wheel from it; install the wheel into an environment that has nothing else, and run tests of the sdist
# there that need neither an engine nor Airflow. All files are in build/dist/.
#   scripts/dist.sh [TEST...]
#   PYTHON   interpreter of that environment (python3.11)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3.11}
out=$PWD/build/dist
(($#)) || set -- tests/answers tests/prompts tests/shards tests/stored_plan tests/test_cli.py tests/test_damage.py
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

rm -rf "$out"
"$PYTHON" -m venv "$out/env"
# The versions that all other tests run with.
sed 's/ --hash=.*//' requirements/cpu-py311-linux-x86_64.lock >"$out/constraints.txt"
pip() { "$out/env/bin/pip" "$1" -qq --constraint "$out/constraints.txt" "${@:2}"; }

pip install build
"$out/env/bin/python" -m build --outdir "$out" . >"$out/build.log" 2>&1 || { cat "$out/build.log" >&2; exit 1; }
"$out/env/bin/pip" uninstall -qq -y build pyproject_hooks packaging
pip install "$out"/batchllm_operator-*.whl
cd "$out" # not beside the checkout's packages
"$out/env/bin/batchllm" schema >/dev/null
"$out/env/bin/pip" check
tar -xf batchllm_operator-*.tar.gz --strip-components=1 --one-top-level=sdist
rm -r sdist/batchllm_operator sdist/kernels # the wheel's are tested
pip install "$(echo batchllm_operator-*.whl)[plan,s3,clouds,delta,iceberg]" hypothesis "moto[server]" "pyiceberg[sql-sqlite]" pytest pytest-xdist
cd sdist
exec "$out/env/bin/pytest" -n 3 --dist loadfile "$@"
