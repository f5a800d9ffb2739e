"""The command line: one thin module per group of verbs. Heavy imports live inside the commands."""
