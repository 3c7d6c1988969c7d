# Everything a newcomer needs: `make demo`, `make test`. Each target installs what it lacks, once.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_RUN := holter-runs/demo
CPU_JOB := ACCELERATE_USE_CPU=true DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
LAUNCH := $(BIN)/accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0

# Sidecars and coordinators start in half the time when the bytecode is there, whatever the machine says of writing it.
export PYTHONDONTWRITEBYTECODE =

TRAIN = $(LAUNCH) deploy/examples/train_gpt.py --steps 60

.PHONY: fuzzer frameworks install system demo test test-all test-quick test-gpu campaign check format bench pictures docs audit release fuzz clean

install: $(STAMP)  ## .venv with holter and everything needed to run and test it

# torch first and pinned: any range that admits a newer one would pull gigabytes of CUDA packages.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard kernels/holter_kernels/csrc/* daemon/holter/*/csrc/*)
	@echo "making $(VENV): torch for the CPU, accelerate, transformers, deepspeed, holter (a minute or two, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	@DS_BUILD_OPS=0 $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -q daemon kernels
	@touch $@

# System programs that some tests use; without them those tests are skipped, visibly.
system:
	@{ command -v promtool && command -v prometheus && { command -v prometheus-alertmanager || command -v alertmanager; }; } > /dev/null || { \
	  echo "installing prometheus and prometheus-alertmanager from the distribution's packages"; \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends prometheus prometheus-alertmanager > /dev/null; } \
	|| echo "could not install prometheus and prometheus-alertmanager: tests that need them are skipped"
	@command -v chromium > /dev/null || { \
	  echo "installing chromium from the distribution's packages"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium > /dev/null; } \
	|| echo "could not install chromium: tests of the page are skipped"
	@{ command -v slurmctld && command -v slurmd && command -v munged && command -v shellcheck; } > /dev/null || { \
	  echo "installing slurm, munge and shellcheck from the distribution's packages"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends slurmctld slurmd slurm-client munge shellcheck > /dev/null; } \
	|| echo "could not install slurm, munge and shellcheck: tests that need them are skipped"
	@{ command -v kubectl && command -v systemd-analyze; } > /dev/null || { \
	  echo "installing kubernetes-client and systemd from the distribution's packages"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$(command -v kubectl > /dev/null || echo kubernetes-client) $$(command -v systemd-analyze > /dev/null || echo systemd) > /dev/null; } \
	|| echo "could not install kubernetes-client and systemd: tests that need them are skipped"
	@{ PATH=$$PATH:/usr/sbin command -v nats-server && command -v ip; } > /dev/null || { \
	  echo "installing nats-server and iproute2 from the distribution's packages"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends nats-server iproute2 > /dev/null; } \
	|| echo "could not install nats-server and iproute2: tests that need them are skipped"

demo: install  ## train a small GPT on 2 ranks, spoil rank 1's batch at step 30: diagnosis, halt, checkpoint, resume, the same bits
	@rm -rf $(DEMO_RUN) $(DEMO_RUN)-weights && mkdir -p $(DEMO_RUN)-weights
	@echo "training a small GPT on 2 CPU ranks; at step 30 rank 1's batch holds one NaN"
	@$(CPU_JOB) $(BIN)/holter launch --run-dir $(DEMO_RUN) -- $(TRAIN) --nan-rank 1 --nan-step 30; test $$? -eq 93
	@echo && echo "\$$ holter report $(DEMO_RUN)" && echo
	@$(BIN)/holter report $(DEMO_RUN); test $$? -eq 1
	@echo && echo "\$$ holter checkpoint verify $(DEMO_RUN)/checkpoints/30" && echo
	@$(BIN)/holter checkpoint verify $(DEMO_RUN)/checkpoints/30
	@echo && echo "\$$ holter resume $(DEMO_RUN) -- accelerate launch … train_gpt.py --resume $(DEMO_RUN)/checkpoints/30/state" && echo
	@$(CPU_JOB) $(BIN)/holter resume $(DEMO_RUN) -- $(TRAIN) --resume $(DEMO_RUN)/checkpoints/30/state --save $(DEMO_RUN)-weights/resumed
	@echo && echo "the same training once more, without the fault and without holter" && echo
	@$(CPU_JOB) $(TRAIN) --save $(DEMO_RUN)-weights/never-stopped
	@echo && $(BIN)/python deploy/examples/same_bits.py $(DEMO_RUN)-weights/never-stopped $(DEMO_RUN)-weights/resumed
	@echo && echo "\$$ holter page $(DEMO_RUN)" && if [ -n "$(KEEP)" ]; then $(BIN)/holter page $(DEMO_RUN); else echo "(make demo KEEP=1 serves the page of this run until Ctrl-C)"; fi

# tests/run.py says in which parts, and tries at most three failed tests again.
test: install system check  ## what CI runs: linters, types, and at least one real job for every mechanism; 20 to 30 minutes on two shared cores
	$(BIN)/python -m tests.run

test-all: install system check fuzzer frameworks  ## everything, before a release: also what is marked `release`; about 45 minutes
	$(BIN)/python -m tests.run --all

# Guided by coverage; has builds for some Pythons only, and without it its tests are skipped, visibly.
fuzzer: install
	@$(BIN)/python -c "import atheris" 2> /dev/null || $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]' \
	|| echo "could not install atheris: fuzzers run without coverage"

frameworks: install
	@$(BIN)/python -c "import kubeflow_trainer_api, lightning, peft, ray, trl" 2> /dev/null || $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[frameworks]' \
	|| echo "could not install kubeflow-trainer-api, lightning, peft, ray and trl: what needs them is skipped"
	@$(BIN)/python -c "import mlflow, tensorboard, trackio, wandb" 2> /dev/null || $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[trackers]' \
	|| echo "could not install mlflow, tensorboard, trackio and wandb: tests with them are skipped"

TARGET ?= wire
SECONDS ?= 60
fuzz: fuzzer  ## one fuzzer, guided by coverage; what it finds is kept: make fuzz TARGET=journal SECONDS=600
	$(BIN)/python -m tests.fuzz $(TARGET) --seconds $(SECONDS) --keep

test-quick: install  ## without real jobs, under two minutes
	$(BIN)/python -m pytest -n 2 -m "not job and not slow"

test-gpu: install  ## the device's own checks, on a real GPU: `holter doctor --gpu`, which a user can paste into an issue
	$(BIN)/holter doctor --gpu

# WRITE=1 puts the score into docs/campaign.md; a case whose result is on disk is not run again.
N ?= 40
SEED ?= 1
HEALTHY ?= 0
campaign: install  ## faults made by a grammar, run and scored: make campaign N=40 SEED=7 HEALTHY=20; MESH=1 for sharded jobs
	$(if $(MESH),$(BIN)/python -m tests.campaign.meshes,$(BIN)/python -m tests.campaign run $(if $(WRITE),--write)) --number $(N) --seed $(SEED) --healthy $(HEALTHY)

check: install  ## linters and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## ratios against peers in the same run
	$(BIN)/python tests/bench/bench_step.py --from-outside --tensors 148 --repeats 3
	$(BIN)/python tests/bench/bench_step.py --from-outside --tensors 291 --repeats 3
	$(BIN)/python tests/bench/bench_step.py --from-outside --tensors 148 --ranks 2 --repeats 3
	$(BIN)/python tests/bench/bench_step.py --from-outside --tensors 48 --ranks 2 --repeats 3 --sharded fsdp2
	$(BIN)/python tests/bench/bench_step.py --from-outside --tensors 48 --ranks 2 --repeats 3 --sharded zero3
	$(BIN)/python tests/bench/bench_step.py --size 10
	$(BIN)/python tests/bench/bench_step.py --size 17 --kinds holter gradients clip plain anomaly debug
	$(BIN)/python tests/bench/bench_kernels.py
	$(BIN)/python tests/bench/bench_guard.py
	$(BIN)/python tests/bench/bench_collectives.py
	$(BIN)/python tests/bench/bench_scrape.py
	$(BIN)/python tests/bench/bench_hosts.py --quarter --hour
	$(BIN)/python tests/bench/bench_strangers.py
	$(BIN)/python tests/bench/bench_nats.py
	$(BIN)/python tests/bench/bench_corpus.py --write

pictures: install system  ## the dashboards, drawn from real jobs' data where no Grafana can run
	$(BIN)/python tests/grafana/draw_dashboards.py grafana/pictures

RELEASE_TOOLS := $(VENV)/.release-tools
$(RELEASE_TOOLS): $(STAMP)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	@touch $@

audit: $(RELEASE_TOOLS)  ## what is known against the pinned versions; needs a way to the index's advisories
	$(BIN)/pip-audit -r constraints.txt --no-deps --disable-pip --strict

release: install $(RELEASE_TOOLS)  ## wheel, sdist, requirements with hashes, SBOM, audit, SHA256SUMS in dist/; UNAUDITED=1 where nobody can be asked
	$(BIN)/python deploy/release/make_release.py $(if $(UNAUDITED),--unaudited)

docs: install  ## the site, in site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

clean:
	rm -rf $(VENV) build dist site *.egg-info holter-runs
