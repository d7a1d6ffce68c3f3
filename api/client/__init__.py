"""The async Python client: calls are enqueued at once and in order, and awaited later."""
