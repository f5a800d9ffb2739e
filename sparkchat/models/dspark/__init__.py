"""DSpark drafters: a block-parallel backbone over the target's features, a sequential head, a confidence head."""
