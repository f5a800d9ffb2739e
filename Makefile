.PHONY: chat test lint clean
.DEFAULT_GOAL := chat

INSTALLED := .venv/.sparkchat-installed

# Chat with the embedded model. The first time, this installs sparkchat and fetches the model.
chat: $(INSTALLED)
	@.venv/bin/sparkchat run

# Every test that needs no GPU and no network.
test: $(INSTALLED)
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 2

lint: $(INSTALLED)
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/lint-imports

clean:
	rm -rf .venv .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml scripts/install
	@scripts/install
