#!/usr/bin/env bash
# Install each peer's packages in a folder of its own, build/peers/NAME, to lie before .venv's: all
# peers then run the same vLLM and torch. The locks have only what .venv lacks or has too new.
set -euo pipefail
cd "$(dirname "$0")/../.."
for lock in benchmarks/peers/*.lock; do
  folder=build/peers/$(basename "$lock" .lock)
  if cmp -s "$lock" "$folder/installed"; then continue; fi
  rm -rf "$folder"
  .venv/bin/pip install -q --no-deps --require-hashes --target "$folder" -r "$lock"
  cp "$lock" "$folder/installed"
done
