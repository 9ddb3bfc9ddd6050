# Everything runs from a virtual environment in .venv, which each target makes when it is missing or out of date.

PYTHON ?= python3
MODEL ?= jevany-tiny
HOST ?= 127.0.0.1
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
OUT ?= build/tiny
BENCH_OUT ?= build/bench
MODES ?=
WEIGHTS ?=
BENCH_FLAGS ?=
LOAD_OUT ?= build/loadtest
PANEL ?= jevbench-shape
MODE ?= serial
RATE ?=
P99 ?=
PROTOCOL ?= grpc
LOAD_FLAGS ?=
MASTER ?= 127.0.0.1
MASTER_PORT ?= 5557

MODELS := $(sort $(patsubst model_repository/%/config.pbtxt,%,$(wildcard model_repository/*/config.pbtxt)))
# What may follow `make TARGET` as NAME=value. A mistyped name would go unnoticed, and its default be taken.
SETTINGS := PYTHON MODEL HOST HTTP_PORT GRPC_PORT METRICS_PORT OUT BENCH_OUT MODES WEIGHTS BENCH_FLAGS LOAD_OUT PANEL MODE \
	RATE P99 PROTOCOL LOAD_FLAGS MASTER MASTER_PORT FORMAT FILES PIP_% HF_%
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
UNKNOWN := $(filter-out $(SETTINGS),$(GIVEN))
$(if $(UNKNOWN),$(error no setting $(UNKNOWN); there are $(SETTINGS)))

BIN := .venv/bin
READY := .venv/.ready
EXTRAS := backend,server,train,loadtest,dev

.DEFAULT_GOAL := help
.PHONY: help setup demo serve fetch test lint format train-tiny bench loadtest load-worker convert-panel report clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | \
		awk -F '\t' '{ printf "  make %-15s %s\n", $$1, $$2 }'

setup: $(READY) ## Make .venv: the client, the model code, PyTorch and a Triton Server from wheels

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
		{ echo "setup: Python 3.11 or 3.12 is needed; name one with PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setup: installing into .venv; the first time this takes some minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

demo: $(READY) ## Serve jevany-tiny, ask one question of each type, stop again
	@exec $(BIN)/python -m jevany_server.demo

serve: $(READY) ## Serve MODEL (jevany-tiny) until Ctrl-C; HOST, HTTP_PORT, GRPC_PORT, METRICS_PORT, WEIGHTS=random
	@exec $(BIN)/python -m jevany_server $(MODEL) --host $(HOST) $(if $(WEIGHTS),--weights $(WEIGHTS)) \
		--http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT)

fetch: $(READY) ## Fetch what MODEL needs into the Hub cache, checked; then HF_HUB_OFFLINE=1 works
	@exec $(BIN)/jevany-admin fetch $(MODEL)

test: $(READY) ## Run the unit tests and the tests against a real Triton over both protocols
	@$(BIN)/python -m pytest

lint: $(READY) ## Check style, formatting and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(READY) ## Rewrite the code in the project's format
	@$(BIN)/ruff format

train-tiny: $(READY) ## Train the two jevany-tiny models into OUT (build/tiny); minutes on a GPU
	@exec $(BIN)/python -m jevany_tiny.train --out $(OUT)

bench: $(READY) ## Time MODEL in every mode on the JevBench-shape panel; MODES="graphs engine", WEIGHTS=random
	@$(if $(filter-out $(MODELS),$(MODEL)),$(error bench: no model $(filter-out $(MODELS),$(MODEL)); there are $(MODELS)))
	@exec $(BIN)/python -m jevany_bench $(MODEL) $(if $(MODES),--modes $(MODES)) $(if $(WEIGHTS),--weights $(WEIGHTS)) \
		--out $(BENCH_OUT) $(BENCH_FLAGS)

compare: $(READY) ## Answer a labelled PANEL=FILE with MODEL in MODES="default engine": accuracy, and how far answers move
	@$(if $(filter file,$(origin PANEL)),$(error compare: PANEL=FILE.jsonl, the requests to answer, is missing))
	@exec $(BIN)/python -m jevany_bench.compare $(MODEL) $(if $(MODES),--modes $(MODES)) --panel $(PANEL)

loadtest: $(READY) ## Measure MODEL behind a server: PANEL, PROTOCOL=http; MODE=open RATE=20, P99=100 finds the highest rate
	@exec $(BIN)/python -m jevany_loadtest $(MODEL) --mode $(MODE) --panel $(PANEL) --transport $(PROTOCOL) \
		$(if $(RATE),--rate $(RATE)) $(if $(P99),--search-p99 $(P99)) $(if $(WEIGHTS),--weights $(WEIGHTS)) \
		--host $(HOST) --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) \
		--master-port $(MASTER_PORT) --out $(LOAD_OUT) $(LOAD_FLAGS)

load-worker: $(READY) ## Make load for the loadtest of another machine, MASTER, MASTER_PORT
	@exec $(BIN)/python -m jevany_loadtest.generator open --master-host $(MASTER) --master-port $(MASTER_PORT)

convert-panel: $(READY) ## Make a panel of benchmark files: FORMAT=jevbench FILES="easy.jsonl ..." PANEL=out.jsonl
	@exec $(BIN)/python -m jevany_loadtest.convert $(FORMAT) $(FILES) $(if $(filter-out file,$(origin PANEL)),--out $(PANEL))

report: $(READY) ## Write tables, pages and the figure from the results in LOAD_OUT
	@exec $(BIN)/python -m jevany_loadtest.report $(LOAD_OUT)

clean: ## Remove .venv and everything that was built
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
