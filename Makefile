# `make run` sets everything up and serves; `make test` sets up and tests.
# Needs Python 3.11 or newer; everything else is fetched.

PYTHON := $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$python; break; }; done)
BIN := .venv/bin
SOURCES := app engine kernels sessions benchmarks migrations tests

.PHONY: setup run test check format clean gpu-check python screenshots

python:
	@test -n "$(PYTHON)" || { echo "Rejoinder needs Python 3.11 or newer; none was found." >&2; exit 1; }

setup: python
	@$(PYTHON) -m app.bootstrap

run: setup
	@exec $(BIN)/rejoinder serve

test: python
	@$(PYTHON) -m app.bootstrap --dev --browser
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

check: python
	@$(PYTHON) -m app.bootstrap --dev --tools-only
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: python
	@$(PYTHON) -m app.bootstrap --dev --tools-only
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

# Pictures of every page in both schemes and both widths, to be looked at.
screenshots: python
	@$(PYTHON) -m app.bootstrap --dev --browser
	$(BIN)/python -m tests.e2e.take_screenshots screenshots

# On a machine with a CUDA device, by its own Python and packages; GPU_CHECK_ARGS=--help.
gpu-check:
	python3 -m benchmarks.gpu_check $(GPU_CHECK_ARGS)

# Leaves data/: chats are not ours to delete.
clean:
	rm -rf .venv node_modules app/static/vendor .mypy_cache .ruff_cache .pytest_cache \
		.import_linter_cache .hypothesis build *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
