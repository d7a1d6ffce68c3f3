"""What probes and monitors ask: /health and /metrics."""
