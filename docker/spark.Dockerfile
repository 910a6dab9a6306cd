# Spark's driver and executors with this package, for plan and commit on Spark. From the repository's root:
#   docker build -f docker/spark.Dockerfile -t batchllm-spark:0.1.0 .
# Spark itself is pyspark's; Apache's image of the same release gives the entry point that Kubernetes calls.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG SPARK_IMAGE=apache/spark:4.3.0-scala2.13-java17-python3-ubuntu

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
RUN python -m pip install --no-cache-dir hatchling==1.33.0 editables==0.6
COPY LICENSE README.md pyproject.toml ./
COPY batchllm_operator batchllm_operator
COPY kernels kernels
RUN python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist .

FROM ${SPARK_IMAGE} AS spark

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="batchllm-spark" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# spark-submit and Hadoop ask for the user's name and home, and end without them.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y openjdk-17-jre-headless procps tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 batchllm \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin batchllm
ENV SPARK_HOME=/usr/local/lib/python3.11/site-packages/pyspark
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    --mount=type=bind,from=spark,source=/opt,target=/from \
    --mount=type=bind,source=requirements/cpu-py311-linux-x86_64.lock,target=/tested.lock \
    sed 's/ --hash=.*//' /tested.lock >/tmp/constraints.txt \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt \
      "batchllm-operator[spark,plan,s3,clouds,iceberg,delta] @ file:///dist/batchllm_operator-${VERSION}-py3-none-any.whl" \
    && rm /tmp/constraints.txt \
    && pip check \
    && cp /from/entrypoint.sh /opt/entrypoint.sh \
    && mkdir -p /opt/batchllm /opt/spark/work-dir \
    && ln -s "${SPARK_HOME%/*}/batchllm_operator/spark_driver.py" /opt/batchllm/plan.py \
    && HOME=/tmp batchllm schema >/dev/null
WORKDIR /opt/spark/work-dir
USER 10001:10001
ENTRYPOINT ["/opt/entrypoint.sh"]
HEALTHCHECK NONE
