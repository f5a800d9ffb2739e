"""DeepSeek V4: published checkpoints, the trunk with state that can be taken back, and the drafters inside them.

config, layout, formats, headers, weights, load_plan: what the files say · scope: how modules take their tensors ·
hyper, attention, compressor, indexer, gate, experts, stack, model: the trunk · cache, sight: state, and what a batch
sees of it · rounding: what the published model was trained with · drafter, mtp, loading: drafters and whole folders.
"""
