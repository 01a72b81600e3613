"""Ranks: how they were started, and how they communicate."""
