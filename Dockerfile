# The daemon with the embedded model.
#   docker build -t quire:cpu .                               for CPUs: PyTorch's CPU build, no compiler
#   docker build -t quire:cuda --build-arg DEVICE=cuda .      for NVIDIA GPUs: the host needs only a driver
#   docker build -t quire:router --target router .                      vllm-router, for deploy/kubernetes
# Every file that pip installs is pinned by its SHA-256 in docker/requirements*.txt. Layers, from what changes rarely to
# what changes often: PyTorch, the other packages with the model, our own wheel.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS dependencies
ARG DEVICE=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PATH=/opt/quire/bin:$PATH
# The environment has no pip: the base image's installs into it.
RUN python3 -m venv --without-pip /opt/quire
COPY docker/requirements-${DEVICE}.txt /src/
# PyTorch's tests and, on CPUs, its C++ headers are of no use here: 195 MB.
# hadolint ignore=DL3003 # to shorten the lines that follow
RUN if [ "$DEVICE" = cpu ]; then set -- --index-url "$TORCH_INDEX"; fi \
    && pip --python /opt/quire install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes \
       --only-binary :all: "$@" --requirement "/src/requirements-$DEVICE.txt" \
    && cd /opt/quire/lib/python3*/site-packages/torch \
    && rm -rf test && find bin -type f ! -name torch_shm_manager -delete \
    && if [ "$DEVICE" = cpu ]; then rm -rf include; fi
COPY docker/requirements.txt /src/
RUN pip --python /opt/quire install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes \
      --only-binary :all: --requirement /src/requirements.txt

FROM dependencies AS package
ARG REVISION=
# hadolint ignore=DL3008 # whichever compiler the pinned Debian release has; it stays in this stage
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY engine engine
COPY server server
COPY loadtest loadtest
COPY quire quire
# setup.py compiles the CPU kernels into the wheel. setuptools is that of docker/requirements.txt.
RUN BUILD_COMMIT="$REVISION" pip --python /opt/quire wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python -c 'import glob, zipfile; names = zipfile.ZipFile(*glob.glob("/wheels/*.whl")).namelist(); assert any(name.endswith(".so") for name in names)'

FROM ${PYTHON_IMAGE} AS router
ENV PATH=/opt/router/bin:$PATH
RUN python3 -m venv --without-pip /opt/router
COPY docker/requirements-router.txt /src/
RUN pip --python /opt/router install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes \
      --only-binary :all: --requirement /src/requirements-router.txt
USER 10001:10001
EXPOSE 9000
ENTRYPOINT ["vllm-router"]

FROM dependencies AS daemon
ARG DEVICE=cpu
ARG REVISION=
# Triton compiles the launch code of its kernels on first use; Python's headers are in the base image.
# hadolint ignore=DL3008 # whichever compiler the pinned Debian release has
RUN if [ "$DEVICE" = cuda ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
# The folders are where docker-compose.yml mounts volumes, which take over their owner.
RUN groupadd --gid 10001 quire && useradd --uid 10001 --gid 10001 --create-home quire \
    && install -d -o quire -g quire /home/quire/.cache /home/quire/.cache/huggingface /var/lib/quire /var/lib/quire/kv
COPY docker/healthcheck.py /opt/quire/healthcheck.py
RUN --mount=type=bind,from=package,source=/wheels,target=/wheels \
    pip --python /opt/quire install --no-cache-dir --disable-pip-version-check --no-deps --no-index /wheels/*.whl
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/home/quire/.cache/huggingface \
    XDG_CACHE_HOME=/var/lib/quire/cache \
    TRITON_CACHE_DIR=/var/lib/quire/cache/triton \
    QUIRE_HOST=0.0.0.0 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL org.opencontainers.image.title="Quire" \
      org.opencontainers.image.description="An OpenAI-compatible LLM serving daemon" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="$REVISION"
USER 10001:10001
WORKDIR /home/quire
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD ["python", "-I", "-S", "/opt/quire/healthcheck.py"]
ENTRYPOINT ["quire", "serve"]

# The last stage is what `docker build .` makes.
FROM daemon
