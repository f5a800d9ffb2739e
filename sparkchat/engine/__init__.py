"""The engine: one process that owns the models and answers requests. Importing this package loads nothing heavy."""
