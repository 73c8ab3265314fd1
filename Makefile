# make run · make test · make lab · make report        (make help tells more)
#
#   PYTHON=python3.12   the interpreter that makes .venv; 3.11 or newer
#   TORCH=auto|cpu|default   auto takes the small CPU build of torch where no NVIDIA driver is found
#   PROFILE=auto|smoke|full, OUT=runs/latest, ARGS="…"   passed to `pdlab run`

PYTHON  ?= python3
VENV    ?= .venv
TORCH   ?= auto
PROFILE ?= auto
OUT     ?= runs/latest
MODEL   ?= smollm2-135m
ARGS    ?=
WORKERS ?= logical

TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed

.PHONY: run test lab report check install clean help

run: $(STAMP)
	$(BIN)/pdlab model fetch $(MODEL)
	$(BIN)/pdlab run --profile $(PROFILE) --out "$(OUT)" $(ARGS)

test: check
	@$(BIN)/pdlab model fetch $(MODEL) || echo "$(MODEL) cannot be fetched here: the tests that need it are skipped"
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lab: $(STAMP)
	$(BIN)/jupyter lab notebooks

report: $(STAMP)
	$(BIN)/python -m pdlab.runner.report "$(OUT)"

install: $(STAMP)

# Installed again when the dependencies change. torch comes first and alone, so that everything after finds it satisfied;
# where the CPU index cannot be reached the package index's own build is taken, which also runs on a CPU.
$(STAMP): pyproject.toml constraints.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "pdlab needs Python 3.11 or newer and '$(PYTHON)' is older; say which: make PYTHON=python3.12 …" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@want="$(TORCH)"; \
	if [ "$$want" = auto ]; then \
	  if [ "$$(uname -s)" != Linux ] || [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null 2>&1; \
	  then want=default; else want=cpu; fi; \
	fi; \
	echo "torch build: $$want"; \
	if [ "$$want" = cpu ]; then \
	  $(PIP) install --quiet --retries 1 --timeout 30 --no-deps --index-url "$(TORCH_CPU_INDEX)" -c constraints.txt torch 2>/dev/null || \
	  echo "no CPU build at $(TORCH_CPU_INDEX); taking the package index's build of torch"; \
	fi
	$(PIP) install --quiet -c constraints.txt -e ".[lab,dev]"
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build

help:
	@echo "make run     run the notebook series and write $(OUT)/index.html"
	@echo "make test    lint, types, imports, then the tests"
	@echo "make lab     open JupyterLab on the notebooks"
	@echo "make report  write $(OUT)/index.html again from the results that are there"
	@echo "make clean   remove the virtual environment and the caches"
