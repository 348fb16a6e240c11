# Two commands are all that a fresh clone needs:  make demo   make test
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: demo test lab notebooks readme

demo: $(VENV)/.ready
	$(BIN)/fedinterp demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n auto --dist worksteal

lab: $(VENV)/.ready
	$(BIN)/fedinterp lab

notebooks: $(VENV)/.ready
	$(BIN)/python tools/notebooks.py

readme: $(VENV)/.ready
	$(BIN)/python tools/readme.py

$(VENV)/.ready: settings.ini setup.py pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing fedinterp and what it needs into $(VENV) (PyTorch is large: this takes some minutes, once)"
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
