#!/usr/bin/env bash
# Builds an image without a Docker daemon: bash docker/build-with-buildah.sh [cpu|cuda] [router]
# Needs root and Debian's packages buildah and debootstrap. Where docker.io can be reached, set
# PYTHON_IMAGE=docker.io/library/python:3.12-slim-bookworm; the default is a Debian 12 made here, with Python 3.11.
# STORE is the folder of the images. STORAGE_DRIVER is overlay, or vfs where overlay mounts are forbidden; vfs copies
# every layer in full. MOUNTS are read-only paths for the
# build alone, SOURCE:TARGET separated by spaces, such as settings of pip: MOUNTS=/root/pip.conf:/etc/pip.conf.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-cpu}
target=${2:-daemon}
store=${STORE:-/var/tmp/quire-images}
base=${PYTHON_IMAGE:-localhost/python:3.11-bookworm}
export STORAGE_DRIVER=${STORAGE_DRIVER:-overlay} BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
images() { buildah --root "$store/root" --runroot "$store/run" "$@"; }

if [ "$base" = localhost/python:3.11-bookworm ] && ! images inspect --type image "$base" > /dev/null 2>&1; then
  root=$(mktemp -d)
  trap 'rm -rf "$root"' EXIT
  debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates bookworm "$root" > /dev/null
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  container=$(images from scratch)
  images add --quiet "$container" "$root" /
  images commit --quiet --rm "$container" "$base"
fi

mounts=()
for mount in ${MOUNTS:-}; do mounts+=(--volume "$mount:ro"); done
[ "$target" = daemon ] && tag=$device || tag=$target
images build --format docker --layers "${mounts[@]}" --target "$target" \
  --build-arg PYTHON_IMAGE="$base" --build-arg DEVICE="$device" \
  --build-arg REVISION="$(git rev-parse HEAD 2> /dev/null || true)" --tag "quire:$tag" .
images images
