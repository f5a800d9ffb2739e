"""The front ends: ``plain`` (one-shot and line REPL, no Textual) and ``app`` (full screen)."""
