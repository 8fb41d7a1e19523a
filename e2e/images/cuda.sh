#!/bin/sh
# usage: cuda.sh FOLDER
# Fills FOLDER with the files that the feature `cuda` needs at run time besides the driver, from
# PyPI: NVIDIA's runtime compiler, and the headers that kernels include. Programs find them with
# CUDA_PATH=FOLDER and LD_LIBRARY_PATH=FOLDER/lib64. The version is the oldest one that supports
# current GPUs, because a driver refuses the output of a compiler that is newer than itself.
set -eu
folder=$1
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-deps --target "$packages" \
    nvidia-cuda-nvrtc-cu12==12.8.93 nvidia-cuda-runtime-cu12==12.8.90 nvidia-cuda-cccl-cu12==12.8.90 \
    nvidia-cuda-nvcc-cu12==12.8.93
mkdir -p "$folder/include" "$folder/lib64"
for part in cuda_runtime cuda_cccl cuda_nvcc; do
    cp -r "$packages/nvidia/$part/include/." "$folder/include/"
done
cp "$packages/nvidia/cuda_nvrtc/lib/"libnvrtc*.so* "$folder/lib64/"
rm -f "$folder/lib64/"*.alt.so*
