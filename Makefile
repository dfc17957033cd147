# Every target does the set-up that it needs. PYTHON=python3.12 chooses the interpreter, TORCH_INDEX=URL where torch comes from, ARGS="--port 8080"
# adds flags.
BIN := .venv/bin
RUN := .venv/.installed-to-run
DEV := .venv/.installed-to-develop
CLIENTS := .venv/.installed-clients
export PYTHON

.PHONY: serve demo test test-all check format lock secrets clean

# The fleet dies with make (PARENT_PID), however make dies.
serve: $(RUN)
	@PARENT_PID=$$PPID exec $(BIN)/tokenfleet serve $(ARGS)

# Two workers, and a page with buttons that kill them: http://127.0.0.1:3000
demo: $(RUN)
	@PARENT_PID=$$PPID exec $(BIN)/tokenfleet serve --demo --hostname 127.0.0.1 --num-gateways 2 --num-workers 2 $(ARGS)

# A module's tests stay with one of the processes, since they share a fleet; ARGS="-n 0" runs everything in one process, for debuggers.
# How many processes there are is decided in tests/conftest.py.
PARALLEL := -n logical --maxprocesses 4 --dist loadscope --no-loadscope-reorder

test: $(DEV)
	$(BIN)/pytest $(PARALLEL) --durations 10 $(ARGS)

test-all: $(CLIENTS)
	$(BIN)/pytest $(PARALLEL) --durations 10 -m 'not gpu' $(ARGS)

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Passwords of the stack of docker-compose.yml.
secrets:
	@sh deploy/make_secrets.sh

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache *.egg-info

INSTALL := pyproject.toml deploy/install.sh deploy/install_torch.sh deploy/requirements.lock

# The versions of what is installed here become those of every installation and image.
lock: $(DEV)
	$(BIN)/python deploy/requirements.py --lock

$(RUN): $(INSTALL)
	@deploy/install.sh worker
	@touch $@

$(DEV): $(INSTALL)
	@deploy/install.sh worker,dev
	@touch $@ $(RUN)

# Clients that tests/clients runs unmodified, in versions that go together; those of Node where there is npm.
# What tests/repo/kubernetes renders and checks manifests with, and what tests/fleet/test_vectors.py compares with.
$(CLIENTS): $(DEV) tests/clients/node/package.json
	@$(BIN)/pip --disable-pip-version-check install -q -e '.[worker,dev,clients,kubernetes,embeddings]'
	@mkdir -p .venv/node && cp tests/clients/node/package.json .venv/node/
	@if command -v npm >/dev/null; then npm install --prefix .venv/node --no-audit --no-fund --loglevel error; fi
	@touch $@
