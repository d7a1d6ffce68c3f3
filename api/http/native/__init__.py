"""The plain API under /v1: commands, results and events as JSON or msgpack."""
