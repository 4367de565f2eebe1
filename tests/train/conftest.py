"""The fixtures of the training tests."""

from support.training import place  # noqa: F401
