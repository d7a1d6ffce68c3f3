"""The base model: loading, sharding with FSDP2, and log-probs from its output head."""
