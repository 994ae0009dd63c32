"""Attributes of objects and modules that have another value for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attribute_set(owner: Any, name: str, value: object) -> Iterator[None]:
    """The block in which an attribute of an object has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
