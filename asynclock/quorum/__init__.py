"""Asking N nodes, and what their votes amount to."""
