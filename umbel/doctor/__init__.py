"""The checks of `umbel doctor`: one finding each, with what to do about it."""
