# Two commands do everything: `make serve` and `make test`. Each sets up what it needs in .venv.
#
#   PORT=9000        another port for `make serve`; FLAGS="..." goes to `blockyard serve` as it is
#   PYTHON=python3.12  the Python that .venv is made with
#   TORCH="torch==2.11.0"  another torch than the one chosen below
#   RAY=1            `make test` installs Ray, too (80 MB): without it the tests of its ranks are skipped
#   NO_INSTALL=1     installs nothing and uses PYTHON as it is (GPU machines without network)

PORT ?= 8000
MODEL ?= demo
FLAGS ?=
PYTHON ?= python3
TORCH_CPU := torch==2.13.0
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

ifeq ($(NO_INSTALL),1)
PY := $(PYTHON)
base-ready test-ready:
else
PY := .venv/bin/python
base-ready: .venv/.base
test-ready: .venv/.base .venv/.test $(if $(RAY),.venv/.ray)
endif
# without bytecode every process that a test starts compiles all its modules
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPATH := .src$(if $(PYTHONPATH),:$(PYTHONPATH))
# -P: the repository root stays off sys.path, where `kernels` would be taken for the package of that name
RUN := $(PY) -P
PIP := .venv/bin/python -m pip --disable-pip-version-check

.PHONY: serve test check pytest test-gpu test-long test-clients test-compose bench lock clean base-ready test-ready

serve: base-ready
	@exec $(RUN) -m blockyard serve $(MODEL) --port $(PORT) $(FLAGS)

test: check pytest

check: test-ready
	$(RUN) -m ruff check services shared kernels tests compose .src/blockyard/__init__.py .src/blockyard/__main__.py
	$(RUN) -m ruff format --check --quiet services shared kernels tests compose
	$(RUN) -m mypy

# The suite is meant for two cores. Its processes wait for others a sixth of the time, so that there are three; those of
# rings wait longer, and are four.
SLOWEST := -q --durations=15 --durations-min=5
# Files run in the order of their names: those with the fewest tests, which would be the last, take long.
BY_FILE := --dist loadfile --no-loadscope-reorder
# Tests that compute, and have no limits of time, run beside all others, on what these leave. They leave the cache of
# pytest alone, where LATE finds what has failed.
COMPUTING := $(addprefix kernels/,attention moe quantized lora) shared/tool_parsers services/scheduler \
	$(addprefix services/gpu_worker/,same_tokens models quantization layers loading attention)
# gives way to all: Linux shares a core among sessions first, and then among the processes of each
IDLE := nice -n 19 sh -c 'echo 19 >/proc/self/autogroup || true; exec "$$0" "$$@"'
# Tests in which a delay of the machine itself would be taken for a fault have it to themselves but for what computes.
# `make pytest ARGS=tests/shared` runs these alone.
ALONE := $(addprefix integration/,failures/test_freezes.py failures/test_broken_links.py failures/test_tokenizer_faults.py) \
	integration/workers/test_ray_ranks.py \
	$(addprefix services/bench/,test_suite.py parallel/test_measures.py prefill_decode/test_measures.py)
OTHERS := $(addprefix --ignore=tests/,integration $(COMPUTING) $(ALONE))
RINGS := $(filter-out %__pycache__/,$(wildcard tests/integration/*/ tests/integration/test_*.py)) $(ALONE:%=--ignore=tests/%)
# Tests that fail beside others, which take their cores, must pass by themselves.
LATE := --last-failed --last-failed-no-failures none -rfEp
pytest: test-ready
ifdef ARGS
	$(RUN) -m pytest $(ARGS)
else
pytest: export OMP_NUM_THREADS := 1
pytest:
	@log=$$(mktemp); setsid $(IDLE) $(RUN) -m pytest $(SLOWEST) --timeout=1200 -p no:cacheprovider -n 2 $(BY_FILE) \
		$(COMPUTING:%=tests/%) >$$log 2>&1 & computing=$$!; \
	trap 'kill $$computing' INT TERM; \
	$(RUN) -m pytest $(SLOWEST) -n 3 $(BY_FILE) $(OTHERS); others=$$?; \
	$(RUN) -m pytest $(SLOWEST) $(ALONE:%=tests/%); alone=$$?; \
	test $$alone = 0 && $(RUN) -m pytest $(SLOWEST) -n 4 $(BY_FILE) $(RINGS); rings=$$?; \
	wait $$computing; computing=$$?; cat $$log; rm $$log; test $$alone = 0 -a $$computing = 0 && \
	{ test $$others = 0 -a $$rings = 0 || { $(RUN) -m pytest $(SLOWEST) $(LATE) tests && echo "late beside others, in time by themselves: the tests above"; }; }
endif

# What needs a GPU, on a machine that has one (with its own torch and Triton: NO_INSTALL=1 PYTHON=python3). `make test` has
# the rest. Tests that need the GPU to themselves run behind the others.
ON_GPU := -p no:benchmark tests/kernels tests/services/gpu_worker tests/services/kv_transfer
test-gpu: test-ready
	$(RUN) -m pytest -q -n 16 --dist worksteal -m "cuda and not cpu and not alone" $(ON_GPU)
	$(RUN) -m pytest -q -m "cuda and alone" $(ON_GPU)

# Property tests of the scheduler and of delayed ranks, with many more histories than in `make test`: about an hour.
PROPERTIES := services/scheduler/test_properties.py services/scheduler/kv_cache/test_block_copies.py \
	services/scheduler/transfers/test_transfer_properties.py services/gpu_worker/execution/test_delayed_ranks.py
test-long: test-ready
	$(RUN) -m pytest -q -n 2 --dist loadfile --hypothesis-profile=long -o timeout=7200 $(PROPERTIES:%=tests/%)
	$(RUN) tests/bench/scheduling/bench_properties.py

# Coding agents from their npm packages, with scripted answers: needs node.
test-clients: test-ready
	npm install --silent --no-audit --no-fund --prefix .clients @anthropic-ai/claude-code @openai/codex @continuedev/cli
	.clients/node_modules/.bin/claude --version
	.clients/node_modules/.bin/codex --version
	.clients/node_modules/.bin/cn --version
	$(RUN) -m pytest -q tests/services/api_gateway/clients

# Builds the compose stack in a real engine: needs root on Debian or Ubuntu, 4 GB and some minutes.
test-compose:
	sh compose/test.sh

bench: test-ready
	$(PY) tests/bench/report.py

.venv/.base: .requirements/base.txt
	@echo "making .venv; this takes a minute"
	@$(PYTHON) -m venv .venv
	@$(PIP) install --quiet --no-deps -r .requirements/base.txt
	@$(install-torch)
	@$(PIP) install --quiet --no-deps --editable .
	@touch $@

.venv/.test: .requirements/test.txt .venv/.base
	@$(PIP) install --quiet --no-deps -r .requirements/test.txt
	@touch $@

.venv/.ray: .requirements/ray.txt .venv/.test
	@$(PIP) install --quiet --no-deps -r .requirements/ray.txt
	@touch $@

# The lock holds all packages but torch, also what torch's CPU build needs, so that no other build of torch is installed
# for a package that wants one, and torch's index is asked for nothing else.
define install-torch
	if [ -n "$(TORCH)" ]; then $(PIP) install "$(TORCH)"; \
	elif nvidia-smi >/dev/null 2>&1; then $(PIP) install "torch>=2.8"; \
	else $(PIP) install --quiet --no-deps --retries 0 --timeout 15 --index-url $(TORCH_CPU_INDEX) $(TORCH_CPU) 2>/dev/null \
	  || $(PIP) install --quiet $(TORCH_CPU); fi
endef

# Writes .requirements/ anew from the ranges in pyproject.toml; torch is its own step above.
lock:
	python3 .requirements/lock.py

clean:
	rm -rf .venv .clients build dist .src/*.egg-info
