"""Decisions without I/O or clock: what runs next, and how a batch is dealt over ranks and micro-batches."""
