"""The coordinator's side of training: model queues, steps in flight, outcomes, snapshots and recovery."""
