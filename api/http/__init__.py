"""The HTTP door: a Ray Serve application that speaks the Tinker API, a plain one under /v1, and OpenAI's completions."""
