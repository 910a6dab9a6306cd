#!/usr/bin/env bash
# Runs the DAG daily_snippets for one date on a small lake table made of the descriptions of
# the installed Python packages, and prints what it did. Everything it makes is in .demo/.
#   DS=2026-01-31   the partition
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
demo="$root/.demo"
log="$demo/airflow.log"
ds="${DS:-2026-01-31}"
spec="$root/dags/specs/daily_snippets.yaml"

if [[ ! "$ds" =~ ^[0-9]{4}-[0-9]{2}-[0-9]{2}$ ]]; then
  echo "demo: DS='$ds' is not a date such as 2026-01-31" >&2
  exit 2
fi
mkdir -p "$demo"

# shellcheck source=scripts/demo_env.sh
source "$root/scripts/demo_env.sh"
use_airflow_home "$demo/airflow"
export BATCHLLM_SPEC_DIR="$root/dags/specs"

fail() {
  echo "demo: $1; the end of $log:" >&2
  tail -n 20 -- "$log" >&2
  exit 1
}

# Keeps Airflow's whole log and passes on which task runs and what its command says.
show_progress() {
  local line message
  while IFS= read -r line; do
    printf '%s\n' "$line" >>"$log"
    case "$line" in
      *'[DAG TEST] starting task_id='*)
        message="${line#*starting task_id=}"
        message="${message%% \[*}"
        printf 'task %s\n' "${message/ map_index=-1/}"
        ;;
      *' [airflow.task.operators.batchllm_operator.'*)
        message="${line%% \[airflow.task.operators.batchllm_operator.*}"
        message="${message#*\] }"
        printf '  %s\n' "${message%"${message##*[![:space:]]}"}"
        ;;
      *'Task instance state updated'*' new_state='*)
        message="${line#* new_state=}"
        printf '  %s\n' "${message%% *}"
        ;;
      *'DagRun Finished:'*)
        message="${line#* state=}"
        printf 'run %s\n' "${message%%,*}"
        ;;
    esac
  done
}

: >"$log"
make_demo_table "$ds"
make_demo_model
"$airflow" db migrate >>"$log" 2>&1 || fail "Airflow's database can't be made"

exec 3> >(show_progress)
progress_pid=$!
"$airflow" dags test daily_snippets "$ds" >&3 2>&1 &
airflow_pid=$!
exec 3>&-
# `dags test` takes an interruption for a failure and retries. Its end is the command's end.
trap 'kill -KILL "$airflow_pid" 2>/dev/null
  echo "demo: stopped; run it again to go on from the last finished part" >&2; exit 130' INT TERM
status=0
wait "$airflow_pid" || status=$?
wait "$progress_pid" || true
trap - INT TERM
if ((status != 0)); then fail "the DAG run failed"; fi

echo
batchllm report --job "$spec" --ds "$ds"
echo "  Airflow's log  $log"
