"""Headless Chromium, where there is one."""

from support.browser import chromium

__all__ = ["chromium"]
