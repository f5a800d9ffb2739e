"""Gemma 4: dense models without per-layer embeddings (12B), and the DSpark drafter that DeepSeek published for it."""
