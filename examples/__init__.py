"""Forks of a few lines. test_all.py runs each of them."""
