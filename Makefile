# The one list of commands. `make demo` and `make test` do all their own set-up.

PYTHON ?= python3
BIN := .venv/bin
MODEL := build/gemma3-270m

# Nothing here talks to a model hub or sends usage data.
export HF_HUB_OFFLINE = 1
export MODULAR_TELEMETRY_ENABLED = 0

PACKAGES := $(patsubst %/,%,$(wildcard attnquant-*/))

.PHONY: help venv model demo test lint bench docs clean

help:
	@echo "make venv   .venv with everything installed"
	@echo "make model  build $(MODEL), the real Gemma 3 270M"
	@echo "make demo   decompose it, and generate from the bundle with MAX"
	@echo "make test   all tests"
	@echo "make lint   ruff, mypy, links in the docs"
	@echo "make bench  benchmarks, as ratios"
	@echo "make docs   the documentation as a site, in build/site"

venv: .venv/done

.venv/done: pyproject.toml constraints.txt $(PACKAGES:%=%/pyproject.toml)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "Python 3.11 is needed: make PYTHON=... venv")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --constraint constraints.txt --group dev \
		$(PACKAGES:%=--editable %)
	touch $@

model: $(MODEL)/config.json

$(MODEL)/config.json: .venv/done
	$(BIN)/python scripts/build_gemma3_270m.py --out $(MODEL)

demo: venv model
	$(BIN)/python scripts/demo.py $(MODEL) --out build/demo

test: venv model
	$(BIN)/pytest -n 2 --dist loadfile -m "not gpu_compile and not exhaustive"

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mkdocs build --strict --quiet --site-dir build/site

bench: venv model
	$(BIN)/python scripts/bench_decompose.py $(MODEL) --out build/bench
	$(BIN)/python scripts/bench_kernel.py --out build/bench
	$(BIN)/python scripts/bench_serving.py $(MODEL) --out build/bench
	$(BIN)/python scripts/bench_start.py $(MODEL) --out build/bench

docs: venv
	$(BIN)/python docs/generate_cli.py
	$(BIN)/mkdocs build --strict --site-dir build/site

clean:
	rm -rf build .venv
