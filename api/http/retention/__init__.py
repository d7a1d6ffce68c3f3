"""What is kept and for how long: saved checkpoints and versions, sessions that ended, folders nothing holds."""
