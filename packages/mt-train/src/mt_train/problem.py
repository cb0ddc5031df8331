"""Errors of a configuration, each with its place and a fix."""

from __future__ import annotations

from mt_files import SchemaError


class ConfigError(SchemaError):
    """All problems of a configuration, each with its `file:line` or override."""
