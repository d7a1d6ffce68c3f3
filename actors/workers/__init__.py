"""A group of trainer ranks: the steps they are sent, where each model stands, the Ray actors themselves."""
