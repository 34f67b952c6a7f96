"""Fixtures of several test modules of this folder."""

from __future__ import annotations

from tests.support.embedded_box import box

__all__ = ["box"]
