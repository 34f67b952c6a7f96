"""Fixtures of several test modules of this folder."""

from __future__ import annotations

from tests.support.example_programs import journal, order, payments, serve, start, urls

__all__ = ["journal", "order", "payments", "serve", "start", "urls"]
