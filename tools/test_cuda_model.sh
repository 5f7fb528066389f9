#!/usr/bin/env bash
# Runs the CUDA sources on the model of a GPU: tools/test_cuda_model.sh plain|asan|race|contract [PYTEST OPTIONS]
# tests/cuda_host/build.py says what the modes are.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=$1
shift
tests=(tests)
variables=(FASTVIT_CUDA_HOST="$mode" OMP_NUM_THREADS=1)
case $mode in
asan)
  read -ra sanitizers < <(.venv/bin/python tests/cuda_host/redirect.py)
  variables+=("${sanitizers[@]}")
  ;;
contract) # Tests that compare the bits of two forms of a kernel.
  tests=(tests/ops/test_{batch_norm,layer_norm,strides}.py tests/cuda_host)
  ;;
esac
.venv/bin/python tests/cuda_host/build.py "$mode"
env "${variables[@]}" .venv/bin/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal \
  --device cuda_model --ignore tests/cuda_host/selftest "${tests[@]}" "$@"
