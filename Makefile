# Everything a newcomer needs: `make demo`, `make test`. Each target installs what it lacks, once.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_RUN := holter-runs/demo
CPU_JOB := ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1
LAUNCH := $(BIN)/accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0

.PHONY: install system demo test test-quick check format bench clean

install: $(STAMP)  ## .venv with holter and everything needed to run and test it

# torch first and pinned: any range that admits a newer one would pull gigabytes of CUDA packages.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard kernels/holter_kernels/csrc/*)
	@echo "making $(VENV): torch for the CPU, accelerate, transformers, holter (a minute or two, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# System programs that some tests use; without them those tests are skipped, visibly.
system:
	@command -v promtool > /dev/null || { \
	  echo "installing prometheus (for promtool) from the distribution's packages"; \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends prometheus > /dev/null; } \
	|| echo "could not install prometheus: tests that need promtool are skipped"

demo: install  ## train a small GPT on 2 ranks, spoil rank 1's batch at step 30, show the diagnosis
	@rm -rf $(DEMO_RUN)
	@echo "training a small GPT on 2 CPU ranks; at step 30 rank 1's batch holds one NaN"
	@$(CPU_JOB) $(LAUNCH) -m holter --run-dir $(DEMO_RUN) deploy/examples/train_gpt.py --steps 60 --nan-rank 1 --nan-step 30
	@echo && echo "\$$ holter report $(DEMO_RUN)" && echo
	@$(BIN)/holter report $(DEMO_RUN); test $$? -eq 1

test: install system check  ## everything, as CI runs it
	$(BIN)/python -m pytest

test-quick: install  ## without real jobs
	$(BIN)/python -m pytest -m "not job and not slow"

check: install  ## linters and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## ratios against peers in the same run
	$(BIN)/python tests/bench/bench_step.py --size 10
	$(BIN)/python tests/bench/bench_step.py --size 17 --kinds holter gradients clip plain anomaly debug
	$(BIN)/python tests/bench/bench_kernels.py
	$(BIN)/python tests/bench/bench_corpus.py --write

clean:
	rm -rf $(VENV) build dist *.egg-info holter-runs
