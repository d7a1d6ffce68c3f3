"""OpenAI completions and chat completions over the samplers."""
