"""The built-in engine: continuous batching over a transformers model, adapters applied row by row."""
