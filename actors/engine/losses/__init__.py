"""Losses: the contract a loss fulfils, the built-in ones, the registry, and the per-datum columns."""
