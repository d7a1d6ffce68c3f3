"""Whose is what: keys, ids, and the records of sessions, models, samplers and saves."""
