"""Benchmarks of compute: training, packing, log-probs, metrics, sampling."""
