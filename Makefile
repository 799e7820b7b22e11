# Needs Python 3.11, 3.12 or 3.13 and PyPI. Everything it installs goes into .venv.
#   make train CONFIG=configs/llama-125m.yaml ARGS="optim.lr=3e-4 train.steps=100"
#   make test ARGS="tests/optim -k schedule" JOBS=0
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/quickstart.yaml
ARGS ?=
MINUTES ?= 10
JOBS ?= auto

# Threads that wait sleep: where others use the CPU too, spinning ones cost many times the speed.
export OMP_WAIT_POLICY ?= PASSIVE

PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt
INSTALLED := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
DOCS := $(VENV)/.installed-docs
PYTEST := $(VENV)/bin/python -m pytest
# Several processes share the tests; those of a file stay together, because they share fixtures.
PARALLEL := --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder
BANDIT := $(VENV)/bin/bandit --quiet --configfile pyproject.toml --recursive coatlm tools pretrain.py
# torch 2.11 brings this one, constraints.txt the newest.
OLDEST_TRITON := 3.6.0
# The megatron-core of Python 3.12 and later. Its code also runs on 3.11, but pip has to be persuaded.
NEWEST_MEGATRON = $(shell sed -n 's/^megatron-core==\([0-9.]*\);.*>= "3.12"$$/\1/p' constraints.txt)

.PHONY: help install train test test-all numerics check audit kernels megatron fuzz drill bench format docs
help:
	@echo "make train    train CONFIG ($(CONFIG)) on all GPUs of this machine, else on its CPU"
	@echo "make test     run the tests, in JOBS processes ($(JOBS)); those for GPUs or SLURM where there are any"
	@echo "make test-all the same with those marked slow, which take as long again"
	@echo "make numerics run the tests that depend on the order of sums as on another CPU (CAPABILITY=$(CAPABILITY))"
	@echo "make check    lint, formatting, types, who may import whom, and insecure code"
	@echo "make audit    known vulnerabilities of the pinned packages; asks PyPI"
	@echo "make kernels  build all kernels for sm_90 with the oldest Triton as well"
	@echo "make megatron try checkpoints of the newest megatron-core, also on Python 3.11"
	@echo "make fuzz     damage files and options at random for MINUTES ($(MINUTES)), see what happens"
	@echo "make drill    kill, stop, starve and damage a running job, round after round"
	@echo "make bench    measure kernels, layers and the optimizer against their peers"
	@echo "make docs     build the pages and the API of every module as a site in build/site"
	@echo "make format   apply the formatting that make check asks for"

install: $(INSTALLED)

# torch comes first: it is most of the download, and an interrupted install need not repeat it.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || \
	{ echo "no $(PYTHON) here: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit( \
	"coatlm needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is %d.%d: make PYTHON=python3.12" % v)'
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	@touch $@

# An extra of pyproject.toml, for the targets that need it.
$(INSTALLED)-%: $(INSTALLED)
	$(PIP) --editable '.[$*]'
	@touch $@

train: $(INSTALLED)
	@$(VENV)/bin/python tools/launch.py $(CONFIG) $(ARGS)

test: $(DEV)
	@$(PYTEST) $(PARALLEL) --quick $(ARGS)

test-all: $(DEV)
	@$(PYTEST) $(PARALLEL) $(ARGS)

# Vector units of other widths add in another order, and a tolerance may hold on one CPU only. These
# tests run as on a CPU without vector instructions, or with CAPABILITY=avx2 as on one that has no
# wider ones than AVX2; make test-all covers those of this machine.
NUMERICS := tests/fp8 tests/kernels tests/optim tests/model/test_flow.py tests/model/test_loss.py \
	tests/model/test_numerics.py tests/model/test_scales.py tests/train/test_states_log.py \
	tests/train/test_numerics_log.py tests/model/test_output_gemms.py \
	tests/parallel/test_exchange.py tests/parallel/test_fp8_sum.py tests/parallel/test_wire.py \
	tests/parallel/test_fp8_gather.py tests/parallel/test_weight_gather.py \
	tests/parallel/test_finalize_grads.py tests/train/test_guard.py \
	tests/train/test_gradient_rounding.py tests/model/test_bf16_operands.py \
	tests/model/test_rounding.py tests/model/test_documents.py tests/evaluation/test_perplexity.py
CAPABILITY ?= default
ISA_default := SSE41
ISA_avx2 := AVX2

numerics: $(DEV)
	@own=$$($(VENV)/bin/python -c 'import torch; print(torch.backends.cpu.get_cpu_capability())'); \
	if [ "$$own" = DEFAULT ]; then echo "This CPU has no wider vectors: make test covers it."; exit; fi; \
	if [ -z "$(ISA_$(CAPABILITY))" ]; then echo "CAPABILITY=$(CAPABILITY): default or avx2" >&2; exit 2; fi; \
	echo "CPU capability $(CAPABILITY); the machine's own is $$own"; \
	ATEN_CPU_CAPABILITY=$(CAPABILITY) MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=$(ISA_$(CAPABILITY)) \
	$(PYTEST) $(PARALLEL) $(NUMERICS) -k 'not sm90 and not compile and not interpreter' $(ARGS)

check: $(DEV)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(BANDIT)

# Fails as well if a package could not be looked up: nothing found must mean that all were asked for.
audit: $(DEV)
	$(BANDIT)
	grep == constraints.txt | $(VENV)/bin/pip-audit --strict --vulnerability-service pypi \
		--no-deps --disable-pip --progress-spinner off --requirement /dev/stdin

kernels: $(DEV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade \
		--target $(VENV)/triton triton==$(OLDEST_TRITON)
	PYTHONPATH=$(VENV)/triton $(PYTEST) $(PARALLEL) tests/fp8 tests/kernels tests/model tests/optim -k 'sm90 or compile'

megatron: $(DEV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade \
		--python-version 3.12 --ignore-requires-python --only-binary=:all: \
		--target $(VENV)/megatron megatron-core==$(NEWEST_MEGATRON)
	PYTHONPATH=$(abspath $(VENV))/megatron $(PYTEST) $(PARALLEL) \
		tests/convert/test_megatron*.py tests/convert/test_buckets.py $(ARGS)

fuzz: $(DEV)
	@FUZZ_MINUTES=$(MINUTES) $(PYTEST) -s tests/fuzz $(ARGS)

drill: $(INSTALLED)
	@$(VENV)/bin/python tools/drill.py $(ARGS)

bench: $(INSTALLED)
	@$(VENV)/bin/python tools/bench.py $(ARGS)

format: $(DEV)
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

# A warning, such as a link that leads nowhere, is an error. The variable silences a note on mkdocs 2.
docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "open build/site/index.html"
