"""What travels on the bus: commands, events, datums, parts of samples and errors, and how each is encoded."""
