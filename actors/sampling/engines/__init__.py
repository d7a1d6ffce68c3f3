"""What generates inside a replica: the protocol that every engine follows, and the engines."""
