"""The torch engine: load, shard, adapt, score, optimise, checkpoint. No Ray, no Redis."""
