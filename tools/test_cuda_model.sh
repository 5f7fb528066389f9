#!/usr/bin/env bash
# Runs the CUDA sources on the model of a GPU: tools/test_cuda_model.sh plain|asan|race|contract [PYTEST OPTIONS]
# tests/cuda_host/build.py says what the modes are.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=$1
shift
tier="not slow and not models"
[ $# -gt 0 ] || tier+=" and not thorough"
files=(tests/test_{ops,layer_norm,act,arguments,messages}.py tests/cuda_host/test_cuda_host_{kernels,exchange}.py)
variables=(FASTVIT_TEST_DEVICE=cuda_host FASTVIT_CUDA_HOST="$mode" OMP_NUM_THREADS=1)
case $mode in
plain) files+=(tests/test_peer_faults.py) ;;
asan)
  files+=(tests/test_{layers,batch_norm_act}.py)
  read -ra sanitizers < <(.venv/bin/python tests/cuda_host/redirect.py)
  variables+=("${sanitizers[@]}")
  ;;
contract) # Tests that compare the bits of two forms of a kernel.
  ops=(batch_norm_ops_match_the_reference_and_each_other ops_that_invert_y_match_the_reference
    running_statistics_match_the_reference merging_ranks_equals_one_big_batch)
  files=("${ops[@]/#/tests/test_ops.py::test_}" tests/test_layer_norm.py::test_layer_norm_ops_match_the_reference
    tests/cuda_host/test_cuda_host_{kernels,exchange}.py)
  ;;
esac
.venv/bin/python tests/cuda_host/build.py "$mode"
env "${variables[@]}" .venv/bin/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal \
  -m "$tier" "${files[@]}" "$@"
