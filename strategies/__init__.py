"""The methods: what the server does with the updates of a round, one method a file."""

from strategies.base import Outcome, SiteUpdate, UmbelStrategy
from strategies.registry import METHODS, build

__all__ = ["METHODS", "Outcome", "SiteUpdate", "UmbelStrategy", "build"]
