# The first command on a fresh clone may be any of these; python3 and pip are all it takes.
PYTHON ?= python3
TEST_PROCESSES ?= 3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
PUBLIC_MODULES := $(addprefix gradstream.,checkpoints codec data errors ext.analysis ext.replay model optim optim.schedules pipeline runs \
	runtime.simulation session sparse strategies testing trackers)

# Without bytecode on the disk, each of the many processes of the tests would compile all of torch that it imports: 3 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-long test-extras check lint types layers pages histories docs bench format setup
.DEFAULT_GOAL := demo

demo: $(INSTALLED)  ## train a small CNN with 2 workers and 1 parameter server
	$(BIN)/gradstream demo

# Files of tests in three processes, for two cores: many wait for others for half of their time.
PYTEST := $(BIN)/pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test: $(READY)  ## all tests, but of those whose cases take long a few cases
	$(PYTEST) -m "not long"

test-long: $(READY)  ## what `make test` leaves out
	$(PYTEST) -m long

test-fast: $(READY)  ## unit tests and quick simulations, in a minute; tests/slow.txt names what is left out
	$(PYTEST) -m "not slow"

test-extras: $(READY)  ## with the real trackers, trainers of transformers, lightning and accelerate, and Ray
	$(BIN)/pip install --quiet -c constraints.txt -e '.[lightning,transformers,wandb,mlflow,trackio,ray]' 'ray[train]' \
		datasets torchdata webdataset
	$(BIN)/pytest -q tests/integrations tests/trackers/test_trackers.py tests/run/test_ray.py \
		tests/session/test_stream_libraries.py tests/session/test_session_checkpoints.py

check: lint types layers pages histories

# Without its cache: whether an import is ours depends on files that the cache does not watch.
lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff check --no-cache --preview --select PLW1514 src  # text in the encoding of a locale

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	PYTHONPATH=src $(BIN)/lint-imports

pages: $(READY)
	$(BIN)/python tools/check_docs.py
	$(BIN)/codespell

histories: $(READY)  ## what each strategy, codec and rule does on virtual time, beside what it did before
	$(BIN)/python tools/histories.py

docs: $(READY)  ## the reference of the public modules, into build/docs; an undocumented public name fails it
	$(BIN)/python tools/check_docs.py
	PYTHONPATH=src $(BIN)/pdoc -d google -o build/docs gradstream '!gradstream[.].*' $(PUBLIC_MODULES)

bench: $(READY)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python bench/grpc_bulk.py --sweep
	$(BIN)/python bench/server_bulk.py
	$(BIN)/python bench/server_bulk.py --carrier tcp --elems 74770901
	$(BIN)/python bench/carriers.py
	$(BIN)/python bench/ping_behind_bulk.py
	$(BIN)/python bench/ping_behind_bulk.py --carrier tcp
	$(BIN)/python bench/allreduce.py
	$(BIN)/python bench/collectives.py
	$(BIN)/python bench/hogwild.py
	$(BIN)/python bench/pipeline_runs.py
	$(BIN)/python bench/batch_methods.py
	if [ -n "$$GRADSTREAM_DATA" ]; then $(BIN)/python bench/caltech101.py; fi
	$(BIN)/python bench/tables.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(READY)

# Once per change of the dependencies. Without python3-venv (Debian) the environment comes
# without pip, and the pip outside installs into it. The demo needs no tool of the developers. Python compiles what it
# imports; compiling all of torch takes half a minute.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gradstream needs Python 3.11 or newer; try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
		{ $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; } || \
		{ echo "no virtual environment could be made: install python3-venv, or pip 22.3 or newer" >&2; exit 2; }
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e .
	touch $@

$(READY): $(INSTALLED)
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $@
