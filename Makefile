.PHONY: chat test lint clean
.DEFAULT_GOAL := chat

INSTALLED := .venv/.sparkchat-installed

# Chat with the embedded model. The first time, this installs sparkchat and fetches the model.
chat: $(INSTALLED)
	@.venv/bin/sparkchat run

# Every test that needs no GPU and no network.
# Three at a time on two cores: those of the command line wait a quarter of their time for processes they started.
# The kernels run in Triton's interpreter, which a torch for the CPU alone does not bring.
test: $(INSTALLED)
	@.venv/bin/python -c 'import triton' 2>/dev/null || .venv/bin/python -m pip install -qq 'triton==3.6.0' \
		|| echo "no triton 3.6.0 for this machine: tests/kernels is skipped" >&2
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 3 --dist worksteal

lint: $(INSTALLED)
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/lint-imports

clean:
	rm -rf .venv .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml scripts/install
	@scripts/install
