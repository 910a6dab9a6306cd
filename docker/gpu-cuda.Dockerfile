# The command batchllm on vLLM's own image for NVIDIA GPUs. Build it from the repository's root:
#   docker build -f docker/gpu-cuda.Dockerfile -t batchllm-cuda:0.1.0 .
# To pin a base by digest: --build-arg VLLM_IMAGE=vllm/vllm-openai@sha256:...
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
RUN python -m pip install --no-cache-dir hatchling==1.33.0 editables==0.6
COPY LICENSE README.md pyproject.toml ./
COPY batchllm_operator batchllm_operator
COPY kernels kernels
RUN python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist .

FROM ${VLLM_IMAGE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="batchllm-cuda" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PYTHONDONTWRITEBYTECODE=1
USER 0
# Without a resolver, so that torch, vLLM and their dependencies stay as the image has them; gpu-image.lock is all of them
# resolved together. All packages are compiled, vLLM's too, because pods can't write bytecode; some have files that aren't Python 3.
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    --mount=type=bind,source=docker/gpu-requirements.txt,target=/requirements.txt \
    uv pip install --system --no-cache --no-deps --require-hashes -r /requirements.txt \
    && uv pip install --system --no-cache --no-deps "/dist/batchllm_operator-${VERSION}-py3-none-any.whl" \
    && { python3 -m compileall -qq -j 0 "$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true; } \
    && groupadd --gid 10001 batchllm \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin batchllm
USER 10001:10001
WORKDIR /tmp
# As the user of the pods: missing, unreadable or uncompiled packages fail here.
RUN python3 -c "import fsspec, jinja2, numba, obstore, prometheus_client, pyarrow, s3fs, tokenizers" \
    && python3 -c "from importlib.util import find_spec as f; open(f('vllm').cached); open(f('batchllm_operator').cached)" \
    && batchllm schema >/dev/null
HEALTHCHECK NONE
# The pod gives the command.
ENTRYPOINT []
CMD ["batchllm", "--help"]
