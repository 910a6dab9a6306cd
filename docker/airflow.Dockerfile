# Airflow with the operators and the commands plan and commit. Build it from the repository's root:
#   docker build -f docker/airflow.Dockerfile -t batchllm-airflow:0.1.0 .
# To pin a base by digest: --build-arg AIRFLOW_IMAGE=apache/airflow@sha256:...
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG AIRFLOW_IMAGE=apache/airflow:3.3.2-python3.11

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
RUN python -m pip install --no-cache-dir hatchling==1.33.0 editables==0.6
COPY LICENSE README.md pyproject.toml ./
COPY batchllm_operator batchllm_operator
COPY kernels kernels
RUN python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist .

FROM ${AIRFLOW_IMAGE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="batchllm-airflow" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# hadolint ignore=DL3066
USER airflow
# Airflow is named again with the image's own version, so that nothing can change it, and boto3, so that it follows the botocore
# that s3fs needs. Pods have another home than the image, and must find the installed packages from there.
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    --mount=type=bind,source=docker/airflow-constraints.txt,target=/constraints.txt \
    pip install --no-cache-dir --constraint /constraints.txt \
      "apache-airflow==${AIRFLOW_VERSION}" boto3 \
      "batchllm-operator[airflow,plan,s3,clouds,iceberg,delta] @ file:///dist/batchllm_operator-${VERSION}-py3-none-any.whl" \
    && pip check \
    && HOME=/tmp batchllm schema >/dev/null \
    && HOME=/tmp python -c "import deltalake, obstore, pyiceberg, s3fs, transformers"
HEALTHCHECK NONE
