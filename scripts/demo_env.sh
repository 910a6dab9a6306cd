# shellcheck shell=bash
# Sourced by demo.sh and airflow.sh, with the checkout's folder in $root: the demo's table and specs
# in .demo/, its model, and an Airflow that is independent of the caller's.

demo="$root/.demo"
venv="${BATCHLLM_VENV:-$root/.venv}"
airflow="$venv/bin/airflow"
batchllm=("$venv/bin/python" -P -m batchllm_operator)

if [[ ! -x "$airflow" ]]; then
  echo "there is no Airflow in $venv; run 'make setup' first" >&2
  exit 1
fi

# Nothing is downloaded, and nothing is sent.
stay_by_itself() {
  export DO_NOT_TRACK=1 SCARF_ANALYTICS=false VLLM_NO_USAGE_STATS=1 VLLM_DO_NOT_TRACK=1
  export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
  if [[ -z "${HOME:-}" ]]; then
    export HOME="$demo/home"
    mkdir -p "$HOME"
  fi
}

# Don't read or change an Airflow of the caller's.
use_airflow_home() {
  local name
  for name in $(compgen -e AIRFLOW_ || true); do unset "$name"; done
  export AIRFLOW_HOME="$1"
  export AIRFLOW__CORE__DAGS_FOLDER="$root/dags"
  export AIRFLOW__CORE__LOAD_EXAMPLES=False
  stay_by_itself
}

# make_demo_table DS...: makes the table's content once, as it is the same for each date.
make_demo_table() {
  local ds folder made=""
  for ds in "$@"; do
    folder="$demo/lake/documents/ds=$ds"
    if [[ -f "$folder/part-0.parquet" ]]; then
      made="$folder"
    elif [[ -n "$made" ]]; then
      mkdir -p "$folder"
      cp "$made/part-0.parquet" "$folder/.part-0.parquet.new"
      mv "$folder/.part-0.parquet.new" "$folder/part-0.parquet"
    else
      "$venv/bin/python" "$root/scripts/demo_table.py" "$demo/lake/documents" "$ds"
      made="$folder"
    fi
  done
}

# choose_model NAME: makes it if need be, and sets $specs to the folder of the specs that name it. NAME is smollm2, tiny,
# a folder, or a name on the Hugging Face hub.
choose_model() {
  local model="$1" kind=given status=0
  specs="$root/dags/specs"
  if [[ "$model" == smollm2 ]]; then
    "$venv/bin/python" -P "$root/scripts/real_models.py" smollm2 >/dev/null || status=$?
    ((status)) || return 0
    ((status == 5)) || exit "$status"
    echo "demo: taking a tiny model with random weights, whose texts and scores mean nothing" >&2
    model=tiny
  fi
  if [[ "$model" == tiny ]]; then
    kind=tiny model="$demo/tiny"
    if [[ ! -f "$model/config.json" ]]; then "$venv/bin/python" "$root/scripts/demo_model.py" "$model"; fi
  elif [[ -d "$model" || "$model" == [./]* ]]; then
    model="$(realpath -m -- "$model")"
  else
    unset HF_HUB_OFFLINE
  fi
  # As deep as the specs themselves, because their paths are relative.
  local spec made="$demo/specs-$kind"
  mkdir -p "$made"
  for spec in "$specs"/*.yaml; do
    MODEL="$model" "$venv/bin/python" -P -c '
import os, sys, yaml
spec = yaml.safe_load(sys.stdin)
spec["model"]["path"] = os.environ["MODEL"]
spec["engine"].pop("dtype")
if "labels" in spec and sys.argv[1] == "tiny":  # its tokenizer has Yes and No in pieces
    spec["labels"] = {"relevant": " True", "irrelevant": " False"}
yaml.safe_dump(spec, sys.stdout, sort_keys=False)
' "$kind" <"$spec" >"$made/${spec##*/}"
  done
  specs="$made"
}
