# Everything runs in a virtual environment of its own; only Python 3.11 or newer with pip, and make, must be there.
#
#   make demo    see the same text come out faster       make test    the whole test suite
#   make check   lint, types and tests                   make clean   remove what this file made
#   make test-vllm   the plugin for vLLM, in .venv-vllm (2.5 GB)
#
# To override: make demo PYTHON=python3.12          (after make clean, where an environment exists)
#              make demo TORCH=torch==2.14.1
#              make demo TORCH_INDEX=https://download.pytorch.org/whl/cu130
#              make test WORKERS=8 PYTEST_ARGS="-k sampling"

PYTHON ?= $(shell for python in python3 python3.12 python3.11 python; do \
  $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
  && echo $$python && break; done)
VENV ?= .venv
# A release that has a CPU build, tried first, keeps the install small where there is no GPU.
TORCH ?= torch==2.13.0
# Where that build is looked for besides PyPI; `none` turns it off, unset lets tools/torch_index.py decide.
TORCH_INDEX ?=
# For vLLM's CPU build, which pins its releases of torch and transformers.
VLLM_VENV ?= .venv-vllm
VLLM_TORCH = torch==2.13.0
OLDEST = transformers==5.17.0
PLAYWRIGHT = playwright>=1.49
WORKERS ?= 2
PYTEST_ARGS ?=

BIN = $(VENV)/bin
# What is installed follows from these: another set of requirements, or another clone, is installed anew.
KEY := $(shell { cat pyproject.toml; echo "$(CURDIR)"; } | cksum | cut -d ' ' -f 1)
DEMO = $(VENV)/demo-$(KEY).stamp
DEV = $(VENV)/dev-$(KEY).stamp
TORCH_STAMP = $(VENV)/$(subst /,-,$(subst =,-,$(TORCH))).stamp
PIP = $(BIN)/python -m pip --disable-pip-version-check --no-input
# Two workers of one thread each beat one of two: the models of the tests are tiny.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

.PHONY: demo test test-exhaustive test-oldest test-families test-vllm environment browser lint format types size check clean
.DELETE_ON_ERROR:

demo: $(DEMO)
	$(BIN)/ddtree demo

test: $(DEV)
	$(PYTEST)

# The tests that take minutes each and show nothing that `make test` does not imply.
test-exhaustive: $(DEV)
	$(PYTEST) -m exhaustive

# The other end of the supported range: the tests that touch transformers, against its oldest release.
OLDEST_STAMP = $(VENV)/oldest-$(subst /,-,$(subst =,-,$(OLDEST))).stamp
OLDEST_TESTS = tests/model/test_target.py tests/model/test_autoregressive.py tests/model/test_architectures.py \
  tests/engine/test_engine.py tests/integrations/test_transformers.py tests/test_equality.py
test-oldest: $(OLDEST_STAMP)
	PYTHONPATH=$(VENV)/oldest $(BIN)/python -c 'import transformers; print("transformers", transformers.__version__)'
	PYTHONPATH=$(VENV)/oldest $(PYTEST) -k "llama or not equality" $(OLDEST_TESTS)

# All causal-LM families of the installed transformers as tiny models, half an hour; goes on where it stopped.
FAMILIES = $(VENV)/families.jsonl
test-families: $(DEV)
	PYTHONPATH=tests HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python tests/families/sweep.py run $(FAMILIES)
	$(BIN)/python tests/families/sweep.py table $(FAMILIES)

# The plugin inside vLLM's engine; never a part of `make test`. One thread, and one engine at a time.
test-vllm: $(VLLM_VENV)/vllm.stamp
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm $(PYTEST_ARGS)

# All that the tests need, theirs against the oldest transformers included.
environment: $(DEV) $(OLDEST_STAMP)

# What the dashboard's tests need beside a Chromium on the path; they are skipped without the two.
browser: $(DEV)
	$(PIP) install "$(PLAYWRIGHT)"

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV)
	$(BIN)/mypy

# How large the package is, and what imports what.
size: $(DEV)
	$(BIN)/python tools/size.py

check: lint types test

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache

$(TORCH_STAMP):
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv and pip was found: install one, or name it with make PYTHON=..." >&2; exit 1; }
	@echo "==> making $(VENV) with $$($(PYTHON) --version) and $(TORCH), once"
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install "$(TORCH)" $$($(BIN)/python tools/torch_index.py "$(TORCH_INDEX)")
	@touch "$@"

$(DEMO): $(TORCH_STAMP)
	@echo "==> installing ddtree, once"
	$(PIP) install -e '.[gguf]'
	@rm -f $(VENV)/demo-*.stamp $(VENV)/dev-*.stamp
	@touch "$@"

$(DEV): $(TORCH_STAMP)
	@echo "==> installing ddtree and the test tools, once"
	$(PIP) install -e '.[dev]'
	@rm -f $(VENV)/demo-*.stamp $(VENV)/dev-*.stamp
	@touch "$@"

# Laid over the environment, so that torch and the test tools are installed once.
$(OLDEST_STAMP): $(TORCH_STAMP)
	@echo "==> installing $(OLDEST), once"
	rm -rf $(VENV)/oldest
	$(PIP) install --target $(VENV)/oldest "$(OLDEST)"
	@touch "$@"

# vLLM's text models run without the other packages of torch, which PyPI has for CUDA alone, and without Triton.
$(VLLM_VENV)/vllm.stamp: pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv and pip was found: install one, or name it with make PYTHON=..." >&2; exit 1; }
	@echo "==> making $(VLLM_VENV) with vLLM's CPU build, once"
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --no-input install "$(VLLM_TORCH)" $$($(VLLM_VENV)/bin/python tools/torch_index.py "$(TORCH_INDEX)")
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --no-input install -e '.[vllm,gguf]' pytest pytest-xdist httpx openai
	$(VLLM_VENV)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec triton
	@touch "$@"
