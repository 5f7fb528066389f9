#!/usr/bin/env bash
# Runs tests under sanitizers: tools/sanitize.sh cuda|cpu
#   cuda  the CUDA sources on the model of a GPU: under a race checker, under the address and
#         undefined-behaviour sanitizers, and with fused products and sums
#   cpu   the CPU sources under the address and undefined-behaviour sanitizers, with each instruction set
#         of this machine
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1-} in
cuda)
  modes=(race asan)
  if grep -qw fma /proc/cpuinfo; then modes+=(contract); else echo "$0: this CPU has no FMA to fuse with" >&2; fi
  .venv/bin/python tests/cuda_host/build.py
  .venv/bin/python -m pytest -q --device cuda_model -m "" tests/cuda_host/selftest
  for mode in "${modes[@]}"; do
    tools/test_cuda_model.sh "$mode" -m "not memory"
  done
  ;;
cpu)
  # A copy of the package with its own library lies in build/sanitizers.
  CXX="g++ -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-sanitize=vptr" \
    FASTVIT_CUDA=0 FASTVIT_CPU=all \
    .venv/bin/python setup.py -q build --build-lib build/sanitizers --build-temp build/sanitizers.objects
  read -ra sanitizers < <(.venv/bin/python tests/cuda_host/redirect.py)
  capabilities=(default avx2)
  if grep -qw avx512dq /proc/cpuinfo; then capabilities+=(avx512); else echo "$0: this CPU has no AVX-512" >&2; fi
  for capability in "${capabilities[@]}"; do
    env "${sanitizers[@]}" PYTHONPATH=$PWD/build/sanitizers OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=$capability \
      .venv/bin/pytest -q -n auto --maxprocesses 8 --dist worksteal -m "not memory" -k "not compiled" \
      tests/ops tests/sync/test_{messages,cpu_exchange,groups}.py
  done
  ;;
*)
  sed -n '2,/^set/{/^set/!p}' "$0" >&2
  exit 2
  ;;
esac
