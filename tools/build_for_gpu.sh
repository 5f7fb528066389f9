#!/usr/bin/env bash
# Builds the libraries in build/carried, where nvcc is, for a machine with a GPU and no nvcc; `make gpu` takes them
# from there. The oldest torch is used, since its libraries load in all later ones.
set -euo pipefail
cd "$(dirname "$0")/.."
python=build/gpu/bin/python
test -x $python || ${PYTHON:-python3} -m venv build/gpu
$python -m pip install --quiet torch==2.11.0 'setuptools>=77' ninja
FASTVIT_CUDA=1 FASTVIT_CPU=all TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} \
  $python setup.py -q build_ext --build-lib build/carried --build-temp build/carried.objects
$python -c 'import torch
for name in "_C", "_cuda":
    torch.ops.load_library(f"build/carried/fastvit/{name}.so")
print(torch.ops.fastvit.cuda_build())'
git describe --always --exclude '*' --dirty=+changes >build/carried/commit
