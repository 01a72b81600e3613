"""Ranks: how they were started and what they say to each other."""
