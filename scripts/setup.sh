#!/usr/bin/env bash
# Make an environment, or bring it up to date: torch's CPU build where the environment has torch, the
# locked distributions, this package. Does nothing when nothing changed; takes up an interrupted run
# where it stopped.
#
#   scripts/setup.sh [cpu]       .venv: everything
#   scripts/setup.sh compat      .venv-compat: the oldest vLLM that is tested, without Airflow
#   scripts/setup.sh airflow32   .venv-airflow32: Airflow 3.2, without torch and vLLM
#   scripts/setup.sh docs        .venv-docs: what makes the site, without torch, vLLM and Airflow
#
#   PYTHON       interpreter to make it with           python3.11
#   TORCH_SPEC   what to install as torch              torch==<version in pyproject.toml>+cpu
#   TORCH_INDEX  where to look when pip's own configuration doesn't offer TORCH_SPEC
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=${1:-cpu}
lock=requirements/$name-py311-linux-x86_64.lock
venv=$PWD/.venv
[[ $name == cpu ]] || venv+=-$name
stamp=$venv/.batchllm-setup
torch_version=$(sed -n 's/.*"torch==\([0-9.]*\)".*/\1/p' pyproject.toml)
PYTHON=${PYTHON:-python3.11}
TORCH_SPEC=${TORCH_SPEC:-torch==$torch_version+cpu}
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
export PIP_DISABLE_PIP_VERSION_CHECK=1

die() {
  echo "setup: $*" >&2
  exit 1
}

# Identifies what .venv was made from, by content: the file times of a fresh clone mean nothing.
fingerprint() {
  { echo "$venv $TORCH_SPEC" && "$venv/bin/python" -V && cat "$lock" pyproject.toml scripts/setup.sh; } 2>&1 |
    sha256sum
}

is_current() {
  [[ -f $stamp && "$(<"$stamp")" == "$(fingerprint)" ]]
}

# vLLM puts libraries of the environment into LD_PRELOAD, and torch passes its folders to the compiler without
# quotes. Both are split at these characters, which would fail late and without a clear reason.
check_path() {
  local path splits=$'[[:space:]:"\'\\\\]'
  for path in "$PWD" "$(pwd -P)"; do
    [[ ! $path =~ $splits ]] ||
      die "the path of this checkout must not contain spaces, colons, quotes or backslashes:" \
        "vLLM and torch split at them; move it elsewhere: $(printf %q "$path")"
  done
}

check_machine() {
  [[ $(uname -sm) == "Linux x86_64" ]] ||
    die "the lock is for Linux on x86_64, this is $(uname -sm); see CONTRIBUTING.md"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
    die "$PYTHON isn't a Python 3.11; install Debian's python3.11 and python3.11-venv, or set PYTHON"
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$PYTHON can't make virtual environments; install Debian's python3.11-venv"
  command -v lscpu >/dev/null ||
    die "vLLM needs the program lscpu; install Debian's util-linux"
  "$PYTHON" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
    die "vLLM needs libnuma.so.1; install Debian's libnuma1"
}

# Make the environment again if it has another interpreter or path (a moved or copied checkout).
make_venv() {
  if [[ -e $venv ]] && {
    ! "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
      ! grep -F VIRTUAL_ENV= "$venv/bin/activate" | grep -qF "$venv"
  }; then
    echo "setup: ${venv##*/} is broken or was made somewhere else; making it again"
    rm -rf "$venv"
  fi
  [[ -e $venv ]] || "$PYTHON" -m venv "$venv"
}

# pip's warnings concern its configuration, never this project: errors only (-qq). Only .venv is compiled here:
# `make test` starts several processes at once, and each would compile vLLM by itself.
pip_install() {
  local compile=--no-compile
  [[ $name != cpu ]] || compile=--compile
  "$venv/bin/python" -m pip install -qq --no-input --no-deps "$compile" "$@"
}

# The label +cpu makes it impossible to get a CUDA build, wherever pip looks.
install_torch() {
  local log
  log=$(mktemp)
  if ! pip_install "$TORCH_SPEC" 2>"$log"; then
    echo "setup: pip's configuration doesn't offer $TORCH_SPEC; trying $TORCH_INDEX"
    pip_install --index-url "$TORCH_INDEX" "$TORCH_SPEC" 2>>"$log" || { cat "$log" >&2; false; }
  fi
  rm -f "$log"
}

check_path
[[ -f $lock ]] || die "no environment is called $name: there is no $lock"
exec 9<"$lock"
flock 9 # one set-up at a time
if is_current; then
  echo "setup: ${venv##*/} is up to date"
  exit
fi
check_machine
make_venv
rm -f "$stamp"
"$venv/bin/python" scripts/environment.py repair
has_torch=$("$venv/bin/python" scripts/environment.py torch "$name")
if [[ $has_torch == yes ]]; then
  echo "setup: $TORCH_SPEC"
  install_torch
fi
echo "setup: $(grep -c == "$lock") distributions of $lock (takes minutes)"
pip_install --require-hashes -r "$lock"
echo "setup: this package"
pip_install --no-build-isolation -e .
"$venv/bin/python" scripts/environment.py check "$name"
fingerprint >"$stamp"
echo "setup: done in $SECONDS s"
