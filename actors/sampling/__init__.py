"""Sampling: the dispatcher, the replicas it sends to, and the engines that generate inside a replica."""
