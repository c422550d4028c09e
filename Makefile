# Every target does its own set-up: a virtual environment in .venv, made once and renewed when pyproject.toml changes.
# Training needs the package alone; the targets that check the code add the `test` extra.

.DEFAULT_GOAL := help
PYTHON ?= python3
# One more than there are cores: many tests wait for processes.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, len(os.sched_getaffinity(0)) + 1))')
BIN := .venv/bin
STAMP := .venv/.stamp
TEST_STAMP := .venv/.stamp-test
SGLANG := .venv-sglang
SGLANG_LIST := tests/servers/requirements.txt
TRACKERS := .venv-trackers
ENVIRONMENTS := .venv-environments
VLLM := .venv-vllm
VLLM_LIST := tests/servers/vllm-requirements.txt
# Compiling every module of torch and transformers takes longer than downloading them; Python compiles what it imports.
export PYTHONDONTWRITEBYTECODE =
INSTALL := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq --no-compile

.PHONY: package-tree help train environments test test-long test-exhaustive test-changed test-servers test-trackers test-environments test-slurm test-gpu test-flash-attn test-browser test-pythons check lint floors types wheel clean setup

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(STAMP) ## teach a small language model arithmetic by PPO, here and now
	$(BIN)/rlcli train recipes/ppo_math.yaml

# Two multi-threaded torch processes on few cores slow each other down many times over: one thread each.
test test-long test-exhaustive test-changed: export OMP_NUM_THREADS = 1
test test-long test-exhaustive test-changed: export OMP_WAIT_POLICY = PASSIVE
# In the order of their names: xdist would begin with the files of most tests, and end with the few that take longest.
PYTEST_OF_ALL := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(TEST_STAMP) ## run the tests in a few processes (WORKERS=0: in this one; ARGS=… goes to pytest)
	$(PYTEST_OF_ALL) -m "not exhaustive and not long" $(ARGS)

# Not part of `make test`, so that nobody waits for it there: runs of several processes, most of which wait for each other,
# and the contract of `code_reward`, `megatron`, `deepspeed`, `sglang` and `vllm`, whose own code other tests run.
test-long: $(TEST_STAMP) ## run the tests that are marked long
	$(PYTEST_OF_ALL) -m "long and not exhaustive" $(ARGS)

# Not part of `make test`: every layout of ranks, every value of every argument, series of killed processes, whole runs,
# benches, and laws with four times as many examples.
test-exhaustive: $(TEST_STAMP) ## run the tests that are marked exhaustive
	$(PYTEST_OF_ALL) -m "exhaustive or hypothesis" --hypothesis-profile=thorough $(ARGS)

test-changed: $(TEST_STAMP) package-tree ## run the tests that import what has changed since SINCE=HEAD
	@tests=$$($(BIN)/python tests/house/tests_of_changes.py build/package $(SINCE)) && \
	  if [ -n "$$tests" ]; then $(BIN)/python -m pytest -n 0 -m "not exhaustive" $(ARGS) $$tests; \
	  else echo "no test imports what has changed"; fi

# Not part of `make test`: the environment takes minutes and 3 GB, and a server a minute to start.
test-servers: export OMP_NUM_THREADS = 1
test-servers: export OMP_WAIT_POLICY = PASSIVE
test-servers: export RLCLI_SGLANG_PYTHON = $(CURDIR)/$(SGLANG)/bin/python
test-servers: export RLCLI_VLLM_PYTHON = $(CURDIR)/$(VLLM)/bin/python
test-servers: $(TEST_STAMP) ## run the generation contract against real SGLang and vLLM servers, on the CPU
	@if $(MAKE) --no-print-directory $(SGLANG)/.stamp; then \
	  $(BIN)/python -m pytest tests/servers/test_sglang_server.py $(ARGS); \
	else \
	  echo "!!! SGLang could not be installed here: NOTHING WAS TESTED AGAINST A REAL SERVER OF SGLANG" >&2; \
	fi
	@if $(MAKE) --no-print-directory $(VLLM)/.stamp; then \
	  $(BIN)/python -m pytest tests/servers/test_vllm_server.py $(ARGS); \
	else \
	  echo "!!! vLLM could not be installed here: NOTHING WAS TESTED AGAINST A REAL SERVER OF VLLM" >&2; \
	fi
	@$(BIN)/python -m pytest tests/servers/test_whole_runs.py $(ARGS)

# Not part of `make test`: the libraries of all trackers take some minutes and a gigabyte.
test-trackers: export OMP_NUM_THREADS = 1
test-trackers: $(TEST_STAMP) ## mirror runs to real stores of W&B, MLflow, Trackio and TensorBoard, and read them
	@if $(MAKE) --no-print-directory $(TRACKERS)/.stamp; then \
	  $(TRACKERS)/bin/python -m pytest tests/trackers $(ARGS); \
	else \
	  echo "!!! The trackers could not be installed here: NOTHING WAS TESTED AGAINST REAL TRACKERS" >&2; \
	fi

# Not part of `make test`: the libraries take some minutes and a gigabyte.
test-environments: export OMP_NUM_THREADS = 1
test-environments: export OMP_WAIT_POLICY = PASSIVE
test-environments: $(TEST_STAMP) ## play other people's environments: MCP, OpenEnv, reasoning-gym, verifiers
	@if $(MAKE) --no-print-directory $(ENVIRONMENTS)/.stamp; then \
	  $(ENVIRONMENTS)/bin/python -m pytest tests/environments $(ARGS); \
	else \
	  echo "!!! The libraries could not be installed here: NOTHING WAS TESTED AGAINST REAL ENVIRONMENTS OF OTHERS" >&2; \
	fi

# Not part of `make test`: it needs a GPU. Without one it says what was not tested, and succeeds; a GPU that torch cannot
# use is a failure.
test-gpu: $(TEST_STAMP) ## run engines, attention, ranks, memory and time on the GPUs of this machine
	@if nvidia-smi >/dev/null 2>&1 && ! $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  echo "nvidia-smi answers, but this torch cannot use the GPU; remove .venv and run make setup" >&2; exit 1; \
	fi
	$(BIN)/python -m pytest tests/gpu -m gpu $(ARGS)

# Not part of `make test`: Chromium is a package of the system, which root installs.
test-browser: export RLCLI_TEST_BROWSER = 1
test-browser: $(TEST_STAMP) ## look at the page of `rlcli report` in Chromium, without a window
	@if tests/browser/install $(BIN)/python; then \
	  $(BIN)/python -m pytest tests/browser $(ARGS); \
	else \
	  echo "!!! Chromium could not be installed here: NO PAGE WAS OPENED IN A BROWSER" >&2; \
	fi

# Not part of `make test`: it downloads the newest source distributions, without building them. `make test` compares our
# call with those that were recorded (ARGS=--record records again).
test-flash-attn: $(TEST_STAMP) ## compare our call of flash-attn with its newest sources
	@PYTHONPATH=tests/fakes $(BIN)/python tests/ops/flash_attn_sources.py $(ARGS) || { \
	  test $$? -eq 2 && echo "!!! pip has no sources of flash-attn here: OUR CALL WAS NOT COMPARED WITH ITS NEWEST VERSION" >&2; }

# Not part of `make test`: Slurm's daemons are started by root. They use nothing of an installation that is there already.
test-slurm: export OMP_NUM_THREADS = 1
test-slurm: export OMP_WAIT_POLICY = PASSIVE
test-slurm: export RLCLI_TEST_SLURM = 1
# Debian puts daemons where the PATH of an ordinary user does not look.
test-slurm: export PATH := $(PATH):/usr/sbin
test-slurm: $(TEST_STAMP) ## run jobs on a real Slurm cluster of four emulated nodes
	@if tests/slurm/install; then \
	  $(BIN)/python -m pytest tests/slurm $(ARGS); \
	else \
	  echo "!!! Slurm cannot be brought up here: NOTHING WAS TESTED ON A REAL CLUSTER" >&2; \
	fi

check: lint floors types test test-long wheel ## all that must hold before a change lands

lint: $(TEST_STAMP) ## style, and heavy imports where none may be
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

floors: $(TEST_STAMP) package-tree ## which packages may import which
	cd build/package && PYTHONPATH=. $(CURDIR)/$(BIN)/lint-imports --no-cache

types: $(TEST_STAMP) package-tree ## mypy on the package and all components
	cd build/package && $(CURDIR)/$(BIN)/mypy --cache-dir=$(CURDIR)/.mypy_cache

package-tree: $(TEST_STAMP)
	@$(BIN)/python tests/house/package_tree.py build/package

wheel: $(TEST_STAMP) ## build dist/*.whl and use it from a project elsewhere
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation
	$(BIN)/python -m pytest tests/packaging

# Not part of `make check`: each version takes some minutes and gigabytes, and a package index.
test-pythons: wheel ## run the commands of the README on every Python here, each in a fresh environment
	$(BIN)/python tests/packaging/on_every_python.py

setup: $(TEST_STAMP) ## only make .venv

# A GPU that answers decides for the ordinary torch build, which carries CUDA. Without one the exact version is asked
# for first, so that a CPU build is taken where one is on offer.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "rlcli needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
	  echo "Name another one: make PYTHON=python3.12 $(firstword $(MAKECMDGOALS))" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@if nvidia-smi >/dev/null 2>&1; then \
	  echo "set-up: nvidia-smi answers, so the ordinary torch with CUDA"; torch='torch>=2.13'; \
	else \
	  echo "set-up: no NVIDIA GPU here, so torch 2.13.0, as a CPU build where pip finds one"; torch='torch==2.13.0'; \
	fi; \
	$(INSTALL) "$$torch"
	@echo "set-up: rlcli and what it needs (up to a minute)"
	@$(INSTALL) --editable .
	@$(BIN)/python -c 'from importlib.metadata import version; print("set-up: done, with torch", version("torch"))'
	@touch $(STAMP)

$(TEST_STAMP): $(STAMP)
	@echo "set-up: what the tests need"
	@$(INSTALL) --editable '.[test]'
	@touch $(TEST_STAMP)

environments: $(TEST_STAMP) ## install what servers, trackers and other people's environments need (else their targets do)
	@$(MAKE) --no-print-directory --keep-going $(SGLANG)/.stamp $(VLLM)/.stamp $(TRACKERS)/.stamp $(ENVIRONMENTS)/.stamp

# SGLang asks for CUDA builds that a CPU does not need, so what it does need is listed, and it is installed alone.
$(SGLANG)/.stamp: $(SGLANG_LIST)
	@echo "set-up: SGLang, in an environment of its own (some minutes)"
	@test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/python -m pip install -qq --no-compile --disable-pip-version-check -r $(SGLANG_LIST)
	@sed -n 's/^# alone: //p' $(SGLANG_LIST) | \
	  xargs $(SGLANG)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps
	@touch $@

# It requires the exact CPU build of torch, and packages that import CUDA builds of others.
$(VLLM)/.stamp: $(VLLM_LIST)
	@echo "set-up: vLLM, in an environment of its own (some minutes)"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -qq --no-compile --disable-pip-version-check -r $(VLLM_LIST)
	@sed -n 's/^# then: //p' $(VLLM_LIST) | \
	  xargs $(VLLM)/bin/python -m pip install -qq --no-compile --disable-pip-version-check
	@sed -n 's/^# without: //p' $(VLLM_LIST) | xargs $(VLLM)/bin/python -m pip uninstall -qq -y
	@touch $@

# They are installed on top of the packages of .venv, which stay as they are.
$(TRACKERS)/.stamp: EXTRAS = wandb,mlflow,trackio
$(TRACKERS)/.stamp: FURTHER = 'tensorboard>=2.19'
$(ENVIRONMENTS)/.stamp: EXTRAS = mcp,openenv,reasoning-gym,verifiers
$(ENVIRONMENTS)/.stamp: FURTHER = 'openenv>=0.4.1,<1'
$(TRACKERS)/.stamp $(ENVIRONMENTS)/.stamp: $(TEST_STAMP)
	@echo "set-up: the libraries of $(@D), an environment of its own (some minutes)"
	@test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	@$(@D)/bin/python -c 'import pathlib, site, sys; pathlib.Path(site.getsitepackages()[0], "packages_below.pth").write_text(f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
	  "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')"
	@$(@D)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --editable '.[$(EXTRAS)]' $(FURTHER)
	@touch $@

clean: ## remove what building and checking made (environments and runs stay)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv*/*' -prune -exec rm -rf {} +
