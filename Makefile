# Two commands: `make analyze` runs the main job, `make test` passes the tests. Both set up .venv on first use.
PYTHON ?= python3
EXTRAS ?= dev# with dev,realworld the tests on libraries' models run too
BIN := .venv/bin
READY := .venv/.ready
SITE := .venv/.site

.PHONY: analyze test mutants lint docs site wheel clean

analyze: $(READY)
	@$(BIN)/trainstep analyze $(ARGS)

test: $(READY) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not thorough" $(ARGS)
	$(if $(ARGS),,$(BIN)/python tools/trust/mutants.py --sample 6)

mutants: $(READY)
	$(BIN)/python tools/trust/mutants.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python docs/render.py

site: $(SITE)
	$(BIN)/python -m sphinx -q -E -W --keep-going -n -d build/doctrees docs build/site
	@echo build/site/index.html

wheel: $(READY)
	.ci/wheel $(BIN)/python

$(SITE): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $(SITE)

# torch goes first and alone, so that its pinned version is there before anything else can ask for another.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trainstep needs Python 3.11 or later; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $(READY)

clean:
	rm -rf .venv build results
