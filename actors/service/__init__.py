"""The service as a whole: its options, its start, the coordinator, leases on models, what its disk holds."""
