#!/usr/bin/env bash
# Airflow with the example DAGs on this machine, in the foreground: Ctrl-C ends all of it.
#
#   scripts/airflow.sh              start it; its files are in .airflow/
#   scripts/airflow.sh COMMAND ...  run `airflow COMMAND ...` on it
#
#   PORT                   where the pages and the API are served, on localhost only    8080
#   POOL_SLOTS             generate tasks at a time: slots of the pool batchllm_gpu        2
#   BATCHLLM_AIRFLOW_HOME  folder of all its files                                  .airflow
#   BATCHLLM_SPEC_DIR      the DAGs' job specs     dags/specs; their table and model are made
#   BATCHLLM_DAG_DIR       the DAGs; other DAGs than ours are paused at first           dags
#   BATCHLLM_AIRFLOW__...  Airflow's setting AIRFLOW__...; the caller's own is ignored
#   BATCHLLM_VENV          the environment to run                                     .venv
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
home="${BATCHLLM_AIRFLOW_HOME:-$root/.airflow}"
port="${PORT:-8080}"
pool_slots="${POOL_SLOTS:-2}"
dag_dir="${BATCHLLM_DAG_DIR:-$root/dags}"
dag_ids=() # DAGs to wait for; empty: any
if [[ "$dag_dir" == "$root/dags" ]]; then
  dag_ids=(daily_snippets documents_arrive offline_ranking snippets_on_arrival)
fi
ready_s=180

# shellcheck source=scripts/demo_env.sh
source "$root/scripts/demo_env.sh"

fail() {
  echo "airflow: $1" >&2
  exit "${2:-1}"
}

# days_ago N: that date in UTC.
days_ago() { date -u -d "$1 days ago" +%F; }

# The live processes of a session. Airflow's tasks have process groups of their own.
session_pids() {
  local stat line state session
  for stat in /proc/[0-9]*/stat; do
    { read -r line <"$stat"; } 2>/dev/null || continue
    read -r state _ _ session _ <<<"${line##*) }"
    if [[ "$session" == "$1" && "$state" != Z ]]; then
      stat="${stat#/proc/}"
      echo "${stat%/stat}"
    fi
  done
}

# Ends Airflow with all of its tasks; after ten seconds by force.
end_airflow() {
  trap - EXIT
  trap '' INT TERM
  local pid _
  if [[ -n "$ready_pid" ]]; then kill "$ready_pid" 2>/dev/null || true; fi
  kill -TERM -- "-$airflow_pid" 2>/dev/null || true
  for _ in {1..50}; do
    [[ -n "$(session_pids "$airflow_pid")" ]] || return 0
    sleep 0.2
  done
  for pid in $(session_pids "$airflow_pid"); do kill -KILL "$pid" 2>/dev/null || true; done
}

[[ "$port" =~ ^[1-9][0-9]{0,4}$ ]] && ((port < 65536)) || fail "PORT='$port' is not a port" 2
[[ "$pool_slots" =~ ^[1-9][0-9]{0,4}$ ]] || fail "POOL_SLOTS='$pool_slots' is not a number of slots" 2
# An Airflow keeps the first day that it got at its first start.
first_day="$(cat "$home/first-day" 2>/dev/null || days_ago 5)"

use_airflow_home "$home"
export BATCHLLM_SPEC_DIR="${BATCHLLM_SPEC_DIR:-$root/dags/specs}"
export BATCHLLM_POOL=batchllm_gpu BATCHLLM_FIRST_DAY="$first_day"
export AIRFLOW__CORE__DAGS_FOLDER="$dag_dir"
export AIRFLOW__API__HOST=127.0.0.1 AIRFLOW__API__PORT="$port"
export AIRFLOW__CORE__EXECUTION_API_SERVER_URL="http://127.0.0.1:$port/execution/"
export AIRFLOW__CORE__EXECUTOR=LocalExecutor AIRFLOW__CORE__PARALLELISM=4
# On a busy machine the import of a DAG file may take more than 30 s, which would delay its tasks,
# and the answer to a task's first request more than 5 s, which would fail the task.
export AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT=120 AIRFLOW__DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT=180
export AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT=60
# Tasks' logs are files on this machine, so these two servers get no requests.
export AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT=$((port < 65000 ? port + 1 : port - 1))
export AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT=$((port < 65000 ? port + 2 : port - 2))
for setting in $(compgen -e BATCHLLM_AIRFLOW__ || true); do
  export "${setting#BATCHLLM_}=${!setting}"
done
export PATH="$venv/bin:$PATH" # `airflow standalone` starts `airflow ...`

if (($#)); then
  [[ -f "$home/airflow.db" ]] || fail "there is no Airflow in $home yet; start it with 'make airflow'"
  exec "$airflow" "$@"
fi

mkdir -p "$home"
exec 9>"$home/lock"
if ! flock -n 9; then
  fail "an Airflow is running in $home already, as process group $(cat "$home/pid" 2>/dev/null || echo '?')"
fi
"$venv/bin/python" - "$port" <<'PY' || fail "port $port is in use; choose another one with PORT="
import socket
import sys

with socket.socket() as server:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("127.0.0.1", int(sys.argv[1])))
    except OSError:
        sys.exit(1)
PY

days=()
for ago in 5 4 3 2 1 0; do days+=("$(days_ago "$ago")"); done
if ((${#dag_ids[@]})) && [[ "$BATCHLLM_SPEC_DIR" == "$root/dags/specs" ]]; then
  make_demo_table "${days[@]}"
  choose_model "$([[ -d "$root/.models/smollm2" ]] && echo smollm2 || echo tiny)" # no download while it starts
  export BATCHLLM_SPEC_DIR="$specs"
fi

new=()
# Only once: later the user decides what is paused.
if ((${#dag_ids[@]})) && [[ ! -f "$home/first-day" ]]; then
  new=(--unpause daily_snippets documents_arrive snippets_on_arrival)
fi
mkdir -p "$home/config"
cp "$root/scripts/airflow_config/airflow_local_settings.py" "$home/config/"
log="$home/airflow.log"
echo "airflow: starting; log: $log"
setsid "$airflow" standalone >"$log" 2>&1 &
airflow_pid=$!
ready_pid=""
echo "$airflow_pid" >"$home/pid"
trap end_airflow EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

"$venv/bin/python" -P "$root/scripts/airflow_ready.py" --url "http://127.0.0.1:$port" \
  --home "$home" --pid "$airflow_pid" --limit-s "$ready_s" --pool "batchllm_gpu" "$pool_slots" \
  --dags "${dag_ids[@]}" "${new[@]}" 9>&- &
ready_pid=$!
if ! wait "$ready_pid"; then
  echo "airflow: the end of $log:" >&2
  tail -n 30 -- "$log" >&2
  exit 1
fi
echo "$first_day" >"$home/first-day"

if ((${#dag_ids[@]})); then
  cat <<TEXT
  a run       scripts/airflow.sh dags trigger daily_snippets --logical-date ${days[3]}
  a backfill  scripts/airflow.sh backfill create --dag-id daily_snippets \\
                --from-date ${days[0]} --to-date ${days[2]} --max-active-runs 2
  an arrival  scripts/airflow.sh dags trigger documents_arrive --conf '{"ds": "${days[5]}"}'
  catching up scripts/airflow.sh dags unpause offline_ranking   (from $first_day on)
TEXT
fi
echo "  to end it   Ctrl-C"
wait "$airflow_pid" || true
fail "Airflow has ended by itself; see $log"
