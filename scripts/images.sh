#!/usr/bin/env bash
# Build the images, and run a small job in each as a pod does: without root's rights, network, or a root that it can write.
#   IMAGES="airflow gpu-cuda gpu-rocm spark"   which of docker/*.Dockerfile
#   REGISTRY=     what their names begin with, such as registry.example.com/team
#   BUILDER=      docker, podman or buildah; by default the first of them that is installed
#   BUILD_ARGS=   more arguments for its `build`, such as `--build-arg VLLM_IMAGE=...`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
builder=${BUILDER:-$({ type -P docker podman buildah || true; } | head -n 1)} # `type` fails if one of them is absent
[[ -n $builder ]] || { echo "images: install docker, podman or buildah" >&2; exit 2; }
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' batchllm_operator/__init__.py)
export DOCKER_BUILDKIT=1 # for RUN --mount
# Others' layers don't know that a stage has changed which RUN mounts: they would be of an older wheel, or of none.
caching=()
[[ $("$builder" --version) == Docker* ]] || caching=(--no-cache)

job='set -e
cd /tmp
cat >job.yaml <<END
spec_version: 1
name: images
input: {uri: lake/documents, key: snippet_id}
prompt: {template: "{document} {query}"}
model: {path: none}
sampling: {max_tokens: 8}
output: {uri: lake/answers}
engine: {backend: fake, extra_args: {byte_tokens: true}}
END
test "$(id -u)" != 0
mkdir -p lake/documents/ds=2026-01-31
python - <<END
import pyarrow, pyarrow.parquet
rows = {"snippet_id": ["a", "b"], "document": ["A page."] * 2, "query": ["Why?", "When?"]}
pyarrow.parquet.write_table(pyarrow.table(rows), "lake/documents/ds=2026-01-31/a.parquet")
END
batchllm job --job job.yaml --ds 2026-01-31'

for name in ${IMAGES:-airflow gpu-cuda gpu-rocm spark}; do
  image=${REGISTRY:+$REGISTRY/}batchllm-${name#gpu-}:$version
  # shellcheck disable=SC2086
  "$builder" build "${caching[@]}" --file "docker/$name.Dockerfile" --build-arg "VERSION=$version" --tag "$image" ${BUILD_ARGS:-} .
  if [[ $(basename "$builder") == buildah ]]; then # whose containers can always write their root
    container=$("$builder" from "$image")
    trap '"$builder" rm "$container" >/dev/null' EXIT
    "$builder" run --env HOME=/tmp "$container" -- bash -c "$job"
    "$builder" rm "$container" >/dev/null
    trap - EXIT
  else
    "$builder" run --rm --read-only --tmpfs /tmp --network none --cap-drop ALL --env HOME=/tmp --entrypoint bash "$image" -c "$job"
  fi
  echo "images: $image is built, and has run a job"
done
