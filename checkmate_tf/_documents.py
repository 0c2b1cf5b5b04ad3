"""Frozen dataclasses as versioned JSON, and back, with each value of the type that is declared for it."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import itertools
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from checkmate_tf._version import __version__
from checkmate_tf.errors import FileError

Content = typing.TypeVar("Content")

_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclasses.dataclass(frozen=True)
class Document:
    """A kind of JSON text.

    Attributes:
        what: What it holds, for messages.
        name: What its field "format" says.
        version: The one that is written, and the only one that is read.
    """

    what: str
    name: str
    version: int

    def text(self, content: Any, *, indent: int | None = 1) -> str:
        """A dataclass as JSON.

        Raises:
            ValueError: A number is not finite.
        """
        head = {"format": self.name, "version": self.version, "written_by": f"checkmate_tf {__version__}"}
        fields = {field.name: getattr(content, field.name) for field in dataclasses.fields(content)}
        return json.dumps({**head, **fields}, allow_nan=False, indent=indent, default=dataclasses.asdict)

    def read(self, text: str, kind: type[Content]) -> Content:
        """The dataclass that `text` wrote.

        Args:
            text: JSON.
            kind: Its type.

        Raises:
            FileError: The text is none, or of another version.
        """
        content = self._parsed(text)
        if not isinstance(content, dict) or content.get("format") != self.name:
            raise FileError(f'{self.what} must be a JSON object with "format": "{self.name}"; this text is not one.')
        if content.get("version") != self.version:
            raise FileError(
                f"{self.what} must have version {self.version}; this one has {content.get('version')!r} and was "
                f"written by {content.get('written_by')}. Read it with that version, or make it again."
            )
        try:
            found: Content = _typed(content, kind)
            return found
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            reason = f"this one lacks {error}." if isinstance(error, KeyError) else str(error)
            raise FileError(f"{self.what} must have all its fields, of the right kind; {reason}") from error

    def _parsed(self, text: str) -> Any:
        try:
            return json.loads(text, parse_float=_finite, parse_constant=_finite)
        except RecursionError as error:
            raise FileError(f"{self.what} must be JSON; this text is nested too deeply.") from error
        except ValueError as error:  # also a number of thousands of digits
            raise FileError(f"{self.what} must be JSON; this text is not: {error}") from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def _typed(value: Any, kind: Any) -> Any:
    """A value from JSON as one of a type.

    Raises:
        KeyError: A field of a dataclass is missing.
        TypeError, ValueError: It is of another type.
    """
    if kind is Any:
        return value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        row = _checked(value, dict, "an object")
        return kind(**{name: _typed(row[name], of_field) for name, of_field in _fields(kind).items()})
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if value is None and types.NoneType in parts:
            return None
        fitting = [part for part in parts if part in _NAMES and isinstance(value, part)]
        return _typed(value, (fitting or [part for part in parts if part is not types.NoneType])[0])
    if origin is tuple:
        values = _checked(value, list, "a list")
        kinds = itertools.repeat(parts[0], len(values)) if parts[-1] is Ellipsis else parts
        return tuple(_typed(part, of_part) for part, of_part in zip(values, kinds, strict=True))
    if origin is collections.abc.Mapping:
        return {name: _typed(part, parts[1]) for name, part in _checked(value, dict, "an object").items()}
    if isinstance(value, bool) and kind is not bool:
        raise TypeError(f"{value!r} is not {_NAMES[kind]}.")
    return kind(_checked(value, (int, float) if kind is float else kind, _NAMES[kind]))


def _checked(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not {name}.")
    return value


@functools.cache
def _fields(kind: type) -> Mapping[str, Any]:
    """The fields of a dataclass and their types."""
    types_of = typing.get_type_hints(kind)
    return {field.name: types_of[field.name] for field in dataclasses.fields(kind)}
