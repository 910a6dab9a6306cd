#!/usr/bin/env bash
# Runs the jobs daily_snippets and offline_ranking for one date, and prints a summary of each. The input is a
# small lake table with the descriptions of the installed Python packages. All files are in .demo/.
#   DS=2026-01-31   the partition
#   MODEL=          a model's folder, or its name on the Hugging Face hub, for texts that make sense; by default
#                   a tiny one with random weights is made
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
make_demo_table "$ds"

specs="$root/dags/specs"
if [[ -z "${MODEL:-}" ]]; then
  make_demo_model
else
  unset HF_HUB_OFFLINE
  if [[ -d "$MODEL" ]]; then MODEL="$(cd -- "$MODEL" && pwd)"; fi
  # As deep as the specs themselves, because their paths are relative; the model's own type of number.
  mkdir -p "$demo/specs"
  for job in daily_snippets offline_ranking; do
    MODEL="$MODEL" "$venv/bin/python" -P -c '
import os, sys, yaml
spec = yaml.safe_load(sys.stdin)
spec["model"]["path"] = os.environ["MODEL"]
spec["engine"].pop("dtype")
yaml.safe_dump(spec, sys.stdout)
' <"$specs/$job.yaml" >"$demo/specs/$job.yaml"
  done
  specs="$demo/specs"
fi

"${batchllm[@]}" job --job "$specs/daily_snippets.yaml" --ds "$ds"
exec "${batchllm[@]}" job --job "$specs/offline_ranking.yaml" --ds "$ds"
