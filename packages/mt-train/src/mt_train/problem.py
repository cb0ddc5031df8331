"""Errors of a configuration, each with its place and a fix."""

from __future__ import annotations

from mt_files import FieldProblem, SchemaError


class ConfigError(SchemaError):
    """All problems of a configuration, each with its `file:line` or override."""

    @classmethod
    def of(cls, where: str, text: str, path: str = "") -> ConfigError:
        """Return the error of one problem."""
        return cls([FieldProblem(path, text, where)])
