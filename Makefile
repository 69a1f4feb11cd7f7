# `make train` and `make test` set up everything they need; see README.md. Variables: PYTHON, VENV, ARGS, MARKS, CUDA.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
CUDA ?= cuda
MARKS ?= not slow and not ci and not gpu
export PYTHON

BIN = $(VENV)/bin
SETUP = @tools/setup.sh $(VENV)

.PHONY: help train test test-all docs cuda wheels sanitize bench gpu-test gpu-wheels lint types clean

help:
	@echo "make train      train the example language model in bf16 and FP8; ARGS='--steps 1000 --seeds 3 --control' for the proof"
	@echo "make test       build the CPU and CUDA modules, the latter for Hopper, and run the tests of numbers, layers and state (6 minutes)"
	@echo "make test-all   all tests: CUDA without a GPU, tools, pages, and the slow ones"
	@echo "make docs       build the documentation, docs/_build/html/index.html, with warnings as errors"
	@echo "make cuda       build the CUDA module for sm_89, sm_90a, sm_100 and sm_120; needs no GPU"
	@echo "make wheels     sdist and wheels in dist/, of jaxfp8 and jaxfp8-cuda13, each tried after it was built;"
	@echo "                PYTHON='python3.11 python3.12' for all supported Pythons"
	@echo "make sanitize   run the CPU handlers under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make bench      benchmarks, with the Python packages that are installed here (PYTHON=...)"
	@echo "make gpu-test   tests that need an NVIDIA GPU, likewise"
	@echo "make gpu-wheels what a GPU machine without a network may lack, in wheelhouse/ (tools/gpu_session.sh)"
	@echo "make lint       ruff; spelling by codespell"
	@echo "make types      the types that users see: basedpyright"

train:
	$(SETUP) examples
	@$(BIN)/python examples/language_model.py $(ARGS)

# One architecture shows what a test can show, in a fourth of the time; `make cuda` builds all. Without a toolkit, and
# where none can be had, the CUDA tests say why they are skipped; so they do with `CUDA=`, which builds for CPUs alone.
test test-all: export JAXFP8_CUDA_ARCHITECTURES ?= 90a
test:
	$(SETUP) test $(CUDA) || tools/setup.sh $(VENV) test
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "$(MARKS)" $(ARGS)

test-all:
	$(SETUP) test cuda || tools/setup.sh $(VENV) test
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu" $(ARGS)
	@$(BIN)/python -m pytest -q -n 2 tests/bad_days/fuzz --fuzz $$(date +%s):15000

docs:
	$(SETUP) docs
	@$(BIN)/python -m sphinx -q -W --keep-going docs docs/_build/html
	@echo "jaxfp8: docs/_build/html/index.html"

cuda:
	$(SETUP) test cuda
	@$(BIN)/python -c "import jaxfp8; assert jaxfp8.ops.has_cuda_kernels(), 'the CUDA module does not load'; print('jaxfp8: the CUDA module loads and its handlers are registered')"

wheels:
	@tools/wheels.sh $(VENV)-wheels $(ARGS)

sanitize:
	$(SETUP) test
	@PYTHON=$(BIN)/python tools/sanitize.sh

# On a machine with a GPU what is fast there; elsewhere the goals for a CPU. ARGS go to the program that runs.
bench:
	@if nvidia-smi >/dev/null 2>&1; then \
	  $(PYTHON) benchmarks/gpu.py $(ARGS); \
	else \
	  $(PYTHON) benchmarks/trainers.py && $(PYTHON) benchmarks/programs.py && $(PYTHON) benchmarks/meshes.py && $(PYTHON) benchmarks/train_step.py && \
	  $(PYTHON) benchmarks/ops.py $(ARGS); \
	fi

# Neither needs a network: Flax, pytest and what else is missing come from wheelhouse/ (tools/gpu_wheels.sh).
gpu-test:
	@if ls wheelhouse/*.whl >/dev/null 2>&1; then $(PYTHON) -m pip install -q --no-index --no-deps wheelhouse/*.whl; fi
	@$(PYTHON) -m pip install -q --no-index --no-build-isolation --no-deps --force-reinstall -C cmake.define.JAXFP8_CUDA=ON .
	@cd tests && $(PYTHON) -m pytest -m gpu --continue-on-collection-errors ops cuda $(ARGS)

gpu-wheels:
	@tools/gpu_wheels.sh $(VENV)-wheels

lint:
	$(SETUP) test
	@$(BIN)/python -m pip install -q ruff codespell && $(BIN)/ruff check . && $(BIN)/ruff format --check .
	@git ls-files -z '*.md' '*.py' '*.ipynb' '*.cc' '*.cu' '*.h' '*.sh' | xargs -0 $(BIN)/codespell --toml pyproject.toml

types:
	$(SETUP) test
	@$(BIN)/python -m pip install -q basedpyright && $(BIN)/python tools/check_types.py

clean:
	rm -rf build .venv .venv-* dist docs/_build docs/api
