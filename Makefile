# Everything a newcomer needs: `make demo` and `make test`. `make help` prints the targets and the variables below.
#
# TORCH=      what `make install` puts into .venv (default torch==2.13.0)
# PYTHON=     the interpreter that .venv is made from (>= 3.10)
# ALL=1       test: everything, in a quarter of an hour; ALL=rest: what `make test` alone leaves out
# ARGS=       test: more options of pytest, say '-m slow' (many gigabytes)
# MODELS=     test: published models alone (pytest's -k, say 'deit3 or dinov3')
# STACKS=1    test: fastvit.convert in trainers and their models alone
# COVERAGE=1  test: count lines, of Python by coverage.py and of C++ by gcov
# CPU=1       sanitizers: of the CPU's sources, with each instruction set
# COMPILE=    wheel: releases of torch to compile for, say 'torch==2.11.0'
# MINUTES=    gpu: what it may take (default 15)
# OUT=        gpu: the folder for summary.txt and gpu.tar.gz (default runs/gpu)
# TESTS=      gpu: run these tests first, say 'tests/test_ops.py::test_running_statistics_match_the_reference'
# STEPS=      gpu: some steps alone, say 'test_cuda bench_ops'
# DEVICE=cpu  gpu: rehearse it without a GPU
# BUILD=1     gpu: only build the libraries, in build/carried, for a machine with a GPU but no nvcc
# FIX=1       lint: put the style right

TORCH  ?= torch==2.13.0
PYTHON ?= python3
OUT    ?= runs/gpu
MINUTES ?= 15
RUN    := .venv/bin/python
STAMP  := .venv/.installed-$(shell printf '%s' '$(TORCH) $(FASTVIT_CPU) $(FASTVIT_CUDA) $(TORCH_CUDA_ARCH_LIST)' | cksum | cut -d' ' -f1)
SOURCES := 'csrc/*' 'tests/*.cpp' 'tests/*.cu' 'tests/*.h' tests/cuda_host/cuda/atomic
TOOLED := $(if $(and $(wildcard .venv/bin/ruff),$(wildcard .venv/bin/mypy),$(wildcard .venv/bin/mkdocs)),,.venv/.dev)  # lint, docs and sass need these tools, not a current build
BUILT  := setup.py pyproject.toml $(shell find csrc -name '*.[ch]*')

.PHONY: help install demo test sanitizers wheel bench gpu sass lint docs clean

help:  ## This list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 12
	@sed -n 's/^# \([A-Z]*=1* \)/\1/p' Makefile

install: $(STAMP)  ## Fill .venv with torch, the package and what its trainer needs

.venv/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "make install: no $(PYTHON); install Python >= 3.10, or set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make install: $(PYTHON) is older than 3.10; set PYTHON= to a newer one" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make install: $(PYTHON) has no venv module; install it (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv .venv

fastvit/_C.so:  # made by the rule below; listed so that a missing library is built again

$(STAMP): $(BUILT) fastvit/_C.so | .venv/bin/python
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "make install: no C++ compiler; install one (Debian: apt-get install g++), or set CXX=" >&2; exit 1; }
	$(PIP) '$(TORCH)' 'setuptools>=77' ninja
	@rm -f fastvit/*.so
	$(PIP) --no-build-isolation --editable '.[train]'
	@rm -f .venv/.installed-*
	@touch $@

.venv/.%: pyproject.toml | install  # the extras `test` and `dev`
	$(PIP) --no-build-isolation --editable '.[$*]'
	@touch $@

demo: install  ## Train a ViT on digits with 2 ranks; writes runs/demo/index.html
	$(RUN) examples/digits_demo.py

PIP    := $(RUN) -m pip install --quiet --disable-pip-version-check
TRAINERS := accelerate peft lightning mmengine diffusers einops monai ultralytics tyro spmd_types==0.2.3
# Packages that need torch must not replace it.
THIS_TORCH = "torch==$$($(RUN) -c 'import torch; print(torch.__version__)')"
TIER   := $(if $(filter rest,$(ALL)), and thorough,$(if $(ALL)$(ARGS)$(COVERAGE)$(filter sanitizers,$(MAKECMDGOALS)),, and not thorough))
# One more than cores, since some tests wait for seconds.
export PYTEST_XDIST_AUTO_NUM_WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
PYTEST := -m pytest -q -n auto --maxprocesses 8 --dist worksteal -m "not slow and not models$(TIER)"
MODEL  := FASTVIT_TEST_DEVICE=cuda_host OMP_NUM_THREADS=1 $(RUN) $(PYTEST)
OPS    := tests/test_ops.py tests/test_layer_norm.py tests/test_act.py tests/test_arguments.py tests/test_messages.py
INSIDE = cd "$(CURDIR)/build/$(1)" && PYTHONPATH="$(CURDIR)/build/$(1)" OMP_NUM_THREADS=1 "$(CURDIR)/$(RUN)"
# build/$(1): the tree, with the CPU's sources compiled by g++ $(2)
define COPY
rm -rf build/$(1) && mkdir -p build/$(1)
cp -r setup.py pyproject.toml README.md LICENSE csrc fastvit tests benchmarks build/$(1)
rm -f build/$(1)/fastvit/*.so && printf '#!/bin/sh\nexec g++ "$$@" $(2)\n' >build/$(1)/c++ && chmod +x build/$(1)/c++
export CXX="$(CURDIR)/build/$(1)/c++" FASTVIT_CUDA=0 && $(INSIDE) setup.py -q build_ext --inplace
endef
ON_MODEL := $(OPS) tests/cuda_host/test_cuda_host_kernels.py tests/cuda_host/test_cuda_host_exchange.py
# They compare the bits of two forms of a kernel.
BITS := $(addprefix tests/test_ops.py::test_,batch_norm_ops_match_the_reference_and_each_other \
	ops_that_invert_y_match_the_reference running_statistics_match_the_reference merging_ranks_equals_one_big_batch) \
	tests/test_layer_norm.py::test_layer_norm_ops_match_the_reference tests/cuda_host/test_cuda_host_kernels.py tests/cuda_host/test_cuda_host_exchange.py

ifdef MODELS
test: .venv/.test | install
	$(PIP) timm torchvision transformers $(THIS_TORCH)
	$(RUN) -m pytest tests/test_convert_models.py -m "not slow" -k '$(MODELS)' $(ARGS)
else ifdef STACKS
test: .venv/.test | install
	$(PIP) timm torchvision transformers $(TRAINERS) $(THIS_TORCH)
	$(PIP) --no-deps torchtitan  # its trainer's data and logging are not needed
	$(RUN) -m pytest tests/test_stacks.py tests/test_stacks_models.py $(ARGS)
else ifdef ARGS
test: .venv/.test | install
	$(RUN) $(PYTEST) $(ARGS)
else
test: .venv/.$(if $(COVERAGE),dev,test) | install  ## Tests of each op, layer, rank and look-alike; CUDA on a model of a GPU
	rm -rf build/python.coverage*
	$(RUN) $(if $(COVERAGE),-m coverage run) $(PYTEST) --ignore tests/cuda_host
	$(RUN) tests/cuda_host/build.py plain
	$(MODEL) $(ON_MODEL) tests/test_peer_faults.py
ifdef COVERAGE
	$(RUN) -m coverage combine -q
	$(RUN) -m coverage report
	$(call COPY,coverage,-O0 --coverage)
	$(call INSIDE,coverage) $(PYTEST) -k "not compiled" $(OPS) tests/test_peer.py tests/test_statistics.py
	$(call INSIDE,coverage) -m gcovr --root . --filter csrc/ --merge-lines --gcov-ignore-parse-errors=negative_hits.warn_once_per_file --gcov-ignore-parse-errors=suspicious_hits.warn_once_per_file
endif
endif

ifdef CPU
sanitizers: .venv/.dev | install
	$(call COPY,sanitizers,-O1 -g1 -fsanitize=address -fsanitize=undefined -fno-sanitize-recover=undefined -fno-sanitize=vptr)
	for capability in default avx2 avx512; do \
	export $$($(RUN) tests/cuda_host/redirect.py) ATEN_CPU_CAPABILITY=$$capability ;\
	($(call INSIDE,sanitizers) $(PYTEST) -k "not compiled and not instruction_sets" $(OPS) tests/test_peer.py tests/test_statistics.py) || exit ;\
	done
else
sanitizers: .venv/.dev | install  ## The CUDA sources under the race checker and the sanitizers
	$(RUN) tests/cuda_host/build.py
	$(MODEL) -n 0 tests/cuda_host/test_cuda_host_bugs.py
	FASTVIT_CUDA_HOST=race $(MODEL) $(ON_MODEL)
	env $$($(RUN) tests/cuda_host/redirect.py) FASTVIT_CUDA_HOST=asan $(MODEL) $(ON_MODEL) tests/test_layers.py tests/test_batch_norm_act.py
ifeq ($(shell grep -cm1 -w fma /proc/cpuinfo),1)
	$(RUN) tests/cuda_host/build.py contract
	FASTVIT_CUDA_HOST=contract $(MODEL) $(BITS)
else
	@echo 'make sanitizers: no test of fused products and sums, since this processor has no FMA'
endif
endif

ifeq ($(FASTVIT_KERNELS),0)
wheel: | .venv/bin/python
	rm -rf dist
	$(PIP) '$(TORCH)' 'setuptools>=77'
	$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
else
wheel: .venv/.dev | install  ## A wheel for any Linux in dist/, tried in a bare environment
	rm -rf build/wheel dist
	$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(RUN) -m auditwheel repair --exclude 'libtorch*' --exclude libc10.so --wheel-dir dist build/wheel/*.whl
	$(RUN) tools/wheel_matrix.py dist/*.whl $(if $(COMPILE),--compile $(COMPILE)) --torch '$(TORCH)'
endif

bench: install  ## Time layers and the backends of statistics; writes benchmarks/results
	$(RUN) benchmarks/bench_layers.py --threads 1 2
	$(RUN) benchmarks/bench_sync.py --world 2 4 8

ifdef BUILD
# With the oldest torch, since its libraries load in all later ones. Not in fastvit/, where `make install` removes them.
gpu: GPU := build/gpu/bin/python
gpu:
	test -x $(GPU) || $(PYTHON) -m venv build/gpu
	$(GPU) -m pip install --quiet torch==2.11.0 'setuptools>=77' ninja
	FASTVIT_CUDA=1 FASTVIT_CPU=all TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-9.0}" $(GPU) setup.py -q build_ext --build-lib build/carried --build-temp build/carried.objects
	$(GPU) -c 'import torch; [torch.ops.load_library(f"build/carried/fastvit/{name}.so") for name in ("_C", "_cuda")]; print(torch.ops.fastvit.cuda_build())'
	git describe --always --exclude '*' --dirty=+changes >build/carried/commit
else
gpu:  ## On a CUDA GPU: tests, then measurements, in MINUTES
	$(or $(wildcard $(RUN)),$(shell command -v $(RUN)),$(PYTHON)) tools/run_gpu_checks.py --out '$(OUT)' --minutes $(MINUTES) --device $(or $(DEVICE),cuda) --tests "$$TESTS" $(if $(STEPS),--steps $(STEPS))
endif

sass: $(TOOLED)  ## Check registers and machine code of the CUDA kernels; needs nvcc
	@command -v nvdisasm >/dev/null || $(PIP) nvidia-cuda-nvdisasm || true  # without it the program checks registers alone
	$(RUN) tools/kernel_resources.py

lint: $(TOOLED)  ## What CI checks of the style
ifdef FIX
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $$(git ls-files $(SOURCES)) </dev/null
else
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/clang-format --dry-run --Werror $$(git ls-files $(SOURCES)) </dev/null
endif

docs: $(TOOLED)  ## The site in build/docs; a broken link is an error
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build  # --quiet would not count warnings, which are errors here

clean:  ## Remove everything that was built
	rm -rf .venv build dist runs *.egg-info fastvit/*.so
