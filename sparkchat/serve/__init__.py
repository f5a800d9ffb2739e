"""The OpenAI-compatible endpoint: HTTP on one side, the engine process on the other. Imports no torch."""
