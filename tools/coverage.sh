#!/usr/bin/env bash
# Prints the lines that tests reach: of Python by all tests, and of C++ by the tests of the ops.
set -euo pipefail
cd "$(dirname "$0")/.."
options=(-q -n auto --maxprocesses 8 --dist worksteal -m "not memory")
rm -rf build/python.coverage* build/coverage*
.venv/bin/python -m coverage run -m pytest "${options[@]}"
.venv/bin/python -m coverage combine -q
.venv/bin/python -m coverage report

# A copy of the package with its own library lies in build/coverage.
CXX="g++ -O0 --coverage" FASTVIT_CUDA=0 FASTVIT_CPU=all \
  .venv/bin/python setup.py -q build --build-lib build/coverage --build-temp build/coverage.objects
PYTHONPATH=$PWD/build/coverage OMP_NUM_THREADS=1 .venv/bin/pytest "${options[@]}" -k "not compiled" \
  tests/ops tests/sync/test_{messages,cpu_exchange,groups}.py
.venv/bin/gcovr --root . --filter csrc/ --merge-lines \
  --gcov-ignore-parse-errors=negative_hits.warn_once_per_file \
  --gcov-ignore-parse-errors=suspicious_hits.warn_once_per_file
