"""Benchmarks of the way in and out: the bus, the HTTP gateway, the official SDK."""
