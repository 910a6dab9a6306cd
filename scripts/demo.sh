#!/usr/bin/env bash
# Runs the job daily_snippets for one date, and prints a summary. The input is a small lake table with the
# descriptions of the installed Python packages. All its files are in .demo/.
#   DS=2026-01-31   the partition
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
make_demo_model
exec "${batchllm[@]}" job --job "$root/dags/specs/daily_snippets.yaml" --ds "$ds"
