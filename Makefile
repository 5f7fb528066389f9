# `make help` lists the targets. Variables:
#
#   TORCH=torch==2.13.0  what `make install` puts into .venv
#   PYTHON=python3       the interpreter that .venv is made from (>= 3.10)
#   ARGS="-k name"       more options of the program that a target runs, such as pytest's "-m nightly"
#
# The variables of setup.py, such as FASTVIT_CUDA=0, can be set here, too.

TORCH  ?= torch==2.13.0
PYTHON ?= python3
RUN    := .venv/bin/python
PIP    := $(RUN) -m pip install --quiet --disable-pip-version-check
# Another choice of what is installed has another stamp.
CHOICE := $(TORCH) $(FASTVIT_KERNELS) $(FASTVIT_CPU) $(FASTVIT_CUDA) $(TORCH_CUDA_ARCH_LIST)
STAMP  := .venv/.installed-$(shell echo '$(CHOICE)' | cksum | cut -d' ' -f1)
# One worker more than cores, since some tests wait for seconds.
export PYTEST_XDIST_AUTO_NUM_WORKERS ?= $(shell expr $$(nproc) + 1)
PYTEST := -m pytest -q -n auto --maxprocesses 8 --dist worksteal
CPP_FILES := git ls-files 'csrc/*' 'tests/*.cpp' 'tests/*.cu' 'tests/*.h' tests/cuda_host/cuda/atomic

.PHONY: help install demo test test-cuda-model sanitizers coverage wheel results gpu sass lint format docs clean

help:  ## This list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 18

fastvit/_C.so:  # A library that is missing is built by the next rule.

$(STAMP): setup.py pyproject.toml $(shell find csrc -type f) fastvit/_C.so
	test -x $(RUN) || $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	$(PIP) '$(TORCH)' 'setuptools>=77' ninja
	rm -f fastvit/*.so .venv/.installed-*
	$(PIP) --no-build-isolation --editable '.[train,dev]'
	touch $@

install: $(STAMP)  ## Put torch, fastvit (editable) and the tools into .venv

demo: install  ## Train a ViT on digits with 2 ranks; writes runs/demo/index.html
	$(RUN) examples/digits_demo.py

test: install  ## Tests of each op, layer and rank
	$(RUN) $(PYTEST) $(ARGS)

test-cuda-model: install  ## Tests of the ops' CUDA sources on a model of a GPU
	tools/test_cuda_model.sh plain $(ARGS)

sanitizers: install  ## CUDA and CPU sources under the race checker and the sanitizers
	tools/sanitize.sh cuda
	tools/sanitize.sh cpu

coverage: install  ## Count the lines that the tests reach, of Python and of C++
	tools/coverage.sh

wheel: install  ## A wheel for any Linux in dist/, tried in bare environments
	rm -rf build/wheel dist
	FASTVIT_CUDA=$${FASTVIT_CUDA:-1} $(RUN) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(RUN) -m auditwheel repair --exclude 'libtorch*' --exclude libc10.so \
		--wheel-dir dist build/wheel/*.whl
	$(RUN) tools/wheel_matrix.py dist/*.whl $(or $(ARGS),--torch '$(TORCH)')

results:  ## Measure everything on this CPU into benchmarks/results; hours, and resumes
	$(MAKE) install FASTVIT_CPU=all  # ops_cpu_avx2 measures the kernels for AVX2 too
	$(PIP) timm transformers torchvision '$(TORCH)'
	$(RUN) benchmarks/run_benchmarks.py $(ARGS)

gpu:  ## On a CUDA GPU: tests, then measurements, in minutes
	$(or $(wildcard $(RUN)),$(PYTHON)) tools/run_gpu_checks.py --out runs/gpu $(ARGS)

sass: install  ## Check registers and machine code of the CUDA kernels; needs nvcc
	command -v nvdisasm >/dev/null || $(PIP) nvidia-cuda-nvdisasm || true  # Without it registers alone are checked.
	$(RUN) tools/kernel_resources.py $(ARGS)

lint: install  ## What CI checks of the style
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo --no-cache
	$(RUN) benchmarks/page_results.py --check
	.venv/bin/clang-format --dry-run --Werror $$($(CPP_FILES))

format: install  ## Put the style right
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $$($(CPP_FILES))

docs: install  ## The site in build/docs; a broken link is an error
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build  # --quiet would not count warnings, which are errors here

clean:  ## Remove everything that was built
	rm -rf .venv build dist runs *.egg-info fastvit/*.so
