"""The parameter server: the round engine and what it keeps on disk."""
