# PengServe. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
CONFIG ?= deploy/laptop.yaml
BIN := .venv/bin
SHIPPED_MODEL := cluster/demo/model
FLOORS := planners replicas controller cluster simulator
# Tests of files that know nothing of each other run two at a time; those that start engines run one after the other.
PYTEST := timeout 3000 $(BIN)/python -m pytest -q
FAST := not slow and not shapes and not faults and not validation and not gpu
ENGINES := slow and not shapes and not faults and not validation and not gpu
SHAPES := shapes and not faults and not validation and not gpu

# One core does one instance's work, nothing is fetched or reported while it runs.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
export DO_NOT_TRACK ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0
export VLLM_CPU_OMP_THREADS_BIND ?= nobind
export VLLM_LOGGING_LEVEL ?= WARNING

# `make test AVX2=1` and so on: as on a processor that has AVX2 and nothing newer.
ifdef AVX2
export PYTHONPATH := $(CURDIR)/tests/support/avx2
endif

# Every target with a word of help is a name, not a file.
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' Makefile)

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.installed ## Create .venv with the locked CPU set and PengServe itself

.venv/.installed: requirements-cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
		|| { echo "The lock is for Python 3.11 and 3.12: run make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing the locked CPU set into .venv (about 2.5 GB, once)"
	@$(PYTHON) deploy/install.py $(if $(NO_HASHES),--without-hashes) $(BIN)/python requirements-cpu.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo-model: setup ## Train the shipped demo model anew and print its loss (37 minutes on two busy cores)
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/pengserve model make-demo $(SHIPPED_MODEL)  # on busy cores, spinning threads take thrice as long

serve: setup ## Set everything up, then serve the demo model with two instances (Ctrl-C stops)
	@$(BIN)/pengserve up $(CONFIG)

serve-check: ## Run `make serve`, stream one answer, stop it; print the text and the time from command to answer
	@$(PYTHON) deploy/serve_check.py

check: lint types imports fast-tests ## What every commit passes: ruff, mypy, import-linter, fast tests

lint: setup ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: .venv/.floors ## mypy, strict on planners and controller
	@MYPYPATH=.venv/floors $(BIN)/mypy $(FLOORS:%=-p pengserve.%)

# mypy reads no import hooks, and the editable install is one: links show it the same packages.
.venv/.floors: .venv/.installed Makefile
	@rm -rf .venv/floors && mkdir -p .venv/floors/pengserve
	@for floor in $(FLOORS); do ln -s ../../../$$floor .venv/floors/pengserve/$$floor; done
	@ln -s ../../../cluster/client .venv/floors/pengserve/client
	@touch $@

imports: setup ## import-linter: the floors of docs/decisions/0001-house-and-floors.md
	@$(BIN)/lint-imports

fast-tests: setup ## Tests that need neither an engine nor Ray
	@$(PYTEST) -n 2 --dist loadfile -m "$(FAST)"

engine-tests: setup ## Tests with real engines, and one real application under Ray
	@$(PYTEST) -m "$(ENGINES)"

test: fast-tests engine-tests ## What each landing passes beside `make check`: both of the above

test-shapes: setup ## Whole clusters: changes of shape, faults, overload, precision; starts, signals, two clusters on one machine
	@$(PYTEST) -m "$(SHAPES)"

test-faults: setup ## Full matrices: SIGKILL of each member in every phase of a switch, all signals; twenty kills under Ray; hours
	@$(PYTEST) tests/system/test_faults.py --hypothesis-profile=long
	@timeout 14400 $(BIN)/python -m pytest -q -m "faults and not gpu"

test-validation: setup ## Simulations of recorded runs, small runs of the benchmarks, property tests with all their cases
	@$(PYTEST) -m validation
	@$(PYTEST) -n 2 --dist loadfile -m "$(FAST)" --hypothesis-profile=long

test-gpu: ## On a GPU, where PYTHON has '.[gpu,openai,dev]': how long remaps take, kernels and graphs over memory that moved
	@timeout 600 $(PYTHON) -m pytest -q -s -m gpu

WORLD_SEEDS ?= 2000
WORLD_FIRST ?= 0
world: setup ## Thousands of simulated worlds full of faults (WORLD_SEEDS=2000, WORLD_FIRST=0); a broken law is shrunk
	@$(BIN)/python -m tests.world --seeds $(WORLD_SEEDS) --first $(WORLD_FIRST)

soak: setup ## Everything at once, at random: for SOAK_S seconds (600), from SOAK_SEED (1), on SOAK_INSTANCES (2, or 4), SOAK_WITHOUT (names of actions)
	@SOAK_S=$${SOAK_S:-600} $(PYTEST) -q -s tests/system/test_soak.py

diagrams: setup ## Draw docs/processes.svg again
	@$(BIN)/python docs/draw_processes.py

support: setup ## Write docs/support.md again: models and shapes that tests run
	@$(BIN)/python docs/draw_support.py

bench-overhead: setup ## PengServe against vLLM's own server and ray.serve.llm; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.overhead

BENCH_GPUS ?= 1
bench-gpu: ## On GPUs (BENCH_GPUS=1), where PYTHON has '.[gpu,dev]': PengServe against vLLM's own server with its defaults
	@$(PYTHON) -m benchmarks.overhead --gpus $(BENCH_GPUS)

bench-comm: setup ## What groups and peer messages cost; writes benchmarks/results/comm.md
	@$(BIN)/python -m benchmarks.comm

bench-switch: setup ## What merges and splits cost, and what running streams notice; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.switch

bench-migrate: setup ## What streams notice of a migration, and how long drains take; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.migrate

bench-fly: setup ## Bursts and priorities on static dp, static tp and PengServe; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.fly

bench-arena: setup ## What remapping weights as KV costs; writes benchmarks/results/arena.md
	@$(BIN)/python -m benchmarks.arena

bench-cost-model: setup ## How well steps are predicted, and bubbles with and without lookahead; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.cost_model

bench-bubbles: setup ## How long stages of real pipelines stand idle, with lookahead and without; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.bubbles

bench-gemm: setup ## From how many rows on oneDNN multiplies faster over unpacked weights; writes benchmarks/results/gemm.md
	@$(BIN)/python -m benchmarks.gemm

bench-overload: setup ## Bursts beyond memory: vLLM dp and pp, PengServe without and with drops; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.overload

bench-simulator: setup ## How long simulations of 8 and of 1,000 instances take; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.simulator_scale

bench-validation: setup ## Simulations beside what was measured; writes benchmarks/results/simulator-validation.md
	@$(BIN)/python -m benchmarks.validation

bench-tick: setup ## What a tick of the controller costs with up to 1,000 instances; writes benchmarks/results/tick.md
	@$(BIN)/python -m benchmarks.tick

bench-regret: setup ## PengServe against the best static layout on all traces, in virtual time (REGRET="--only azure"); writes benchmarks/results/
	@$(BIN)/python -m benchmarks.regret $(REGRET)

bench-papers: setup ## The papers' scenarios in virtual time: their ratios beside ours; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.papers

bench-slo: setup ## SLOs kept by plain vLLM, a static placement and PengServe: long prompts, long decodes; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.slo

bench-late: setup ## First tokens in time under twice the load that an instance serves, with SLOs and without; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.late

bench-tiers: setup ## KV on device and host: bursts, churn and second turns against plain vLLM; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.tiers

bench-fair: setup ## One tenant floods: vLLM by arrival and by priority, PengServe by shares and with parking; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.fair

clean: ## Remove what make wrote: .venv, the demo model, caches
	rm -rf .venv .pengserve build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
