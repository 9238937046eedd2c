"""Verifiers: they decide whether a completion is right. One module per kind; short rules are in reward.py."""
