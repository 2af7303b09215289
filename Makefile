# `make test` and `make demo` need Python 3.10 or newer and nothing else: they make .venv and install everything in it.
#   make PYTHON=python3.12 test     another Python, for the first time

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The first that is new enough.
PYTHON ?= $(firstword $(foreach python,python3 python3.14 python3.13 python3.12 python3.11 python3.10,$(shell \
	$(python) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $(python))))

# What is imported again and again is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv test lint pytest house docs demo bench soak golden mutants engines least fuzz fixtures browser pictures clean
.DELETE_ON_ERROR:

help:
	@echo "make test      lint, and then the tests"
	@echo "make lint      format, types, import rules; the words and the shape of the source"
	@echo "make demo      the main job on real checkpoints, as a user would see it"
	@echo "make bench     the ratios of the README, measured again"
	@echo "make soak      the long sweeps: kills, faults, fuzzing, big files"
	@echo "make golden    every verb on 840 files and folders against the record of what it did, in tests/golden"
	@echo "make mutants   300 edits of the code, each of which the tests must notice as they did: half an hour"
	@echo "make engines   the real engines (DeepSpeed, accelerate, ...) write folders, which are read; installs them apart"
	@echo "make least     the tests with the least versions that pyproject.toml names; installs them apart"
	@echo "make browser   the tests of the report page in Chromium, which it installs from Debian where it may"
	@echo "make fuzz      coverage-guided fuzzing of the readers: make SECONDS=3600 fuzz"
	@echo "make docs      the documentation as an offline site, in build/site"
	@echo "make house     how the package is built: lines, a verb, walks, designs; what it was, and is to be"
	@echo "make fixtures  the checkpoints of fixtures/make.py, in build/fixtures"
	@echo "make venv      only the set-up       make clean    remove everything that was made"

venv: $(STAMP)

# A .venv that does not run (moved, its Python gone, half made) is made again; one that runs is completed.
$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		test -n "$(PYTHON)" || { echo "no Python 3.10 or newer found: install one, or name it with PYTHON=..." >&2; exit 1; }; \
		echo "making $(VENV) with $(PYTHON)"; rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,dev]'
	@touch $@

# Both at once: of two cores one would do nothing while the types are checked. What lint says comes when it has ended.
test: $(STAMP)
	@mkdir -p build; rm -f build/lint.failed
	@( $(MAKE) --no-print-directory lint >build/lint.log 2>&1 || touch build/lint.failed; echo; cat build/lint.log ) & \
	$(MAKE) --no-print-directory pytest; tested=$$?; wait; \
	test ! -e build/lint.failed || { echo "lint failed: see above, or build/lint.log" >&2; exit 1; }; exit $$tested

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict ckptool
	$(BIN)/lint-imports
	$(BIN)/python -m tests.lint

pytest: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

house: $(STAMP)
	@$(BIN)/python -m tests.support.house

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

demo: $(STAMP)
	@$(BIN)/python -m fixtures.demo

bench: $(STAMP)
	$(BIN)/python -m benchmarks

soak: $(STAMP)
	$(BIN)/python -m pytest -m soak
	CKPTOOL_SOAK=1 $(BIN)/python -m pytest -m hypothesis

golden: $(STAMP)
	$(BIN)/python -m tests.golden

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

# An environment of its own: the engines need other versions than the tests do. DeepSpeed is built without its kernels.
ENGINES := .venv-engines
$(ENGINES)/.installed: pyproject.toml constraints-engines.txt | $(STAMP)
	$(BIN)/python -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy setuptools wheel ninja
	DS_BUILD_OPS=0 $(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		-r constraints-engines.txt
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check pytest hypothesis -e .
	@touch $@

engines: $(ENGINES)/.installed
	DS_ACCELERATOR=cpu $(ENGINES)/bin/python -m pytest -m engines tests/engines

# The least versions that pyproject.toml names, in an environment of their own. Not of torch and safetensors: the tests
# call what came later. click is not ours to bound: the newest warns of what this typer calls, which fails a test.
LEAST := .venv-least
$(LEAST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(LEAST)
	sed '/^\(examples\|fuzz\|docs\|dev\) =/,/\]$$/d' pyproject.toml | grep -o '"[a-z][a-z0-9_]*>=[0-9.]*"' \
		| sed 's/"//g; s/>=/==/; s/^torch==.*/torch==2.13.0/; /^safetensors/d' \
		| $(LEAST)/bin/python -m pip install --quiet --disable-pip-version-check -r /dev/stdin click==8.1.8 \
		hypothesis ipykernel jsonschema nbclient pytest pytest-xdist -e .
	@touch $@

least: $(LEAST)/.installed
	$(LEAST)/bin/python -m pytest -n 2 --dist loadfile

# What make test skips where there is no Chromium.
browser: $(STAMP)
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
		test "$$(id -u)" = 0 || { echo "no Chromium: as root, apt-get install chromium chromium-driver" >&2; exit 1; }; \
		apt-get install -y -q chromium chromium-driver; }
	$(BIN)/python -m pytest tests/browser

# The screenshots of docs/report.md, and those of many more kinds of files, in build/pictures.
pictures: $(STAMP)
	$(BIN)/python -m fixtures.pictures build/pictures

# SECONDS of coverage-guided fuzzing of the readers; findings are kept in build/fuzz.
SECONDS ?= 300
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

fixtures: $(STAMP)
	$(BIN)/python -m fixtures.make build/fixtures

clean:
	rm -rf $(VENV) $(ENGINES) $(LEAST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
