"""The demo: a small model learns by reinforcement, start to end."""
