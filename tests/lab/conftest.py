"""The lab's commands are tested as the product's are."""

from tests.cli.conftest import cache, pair

__all__ = ["cache", "pair"]
