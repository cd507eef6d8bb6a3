"""Local work, one file a kind; no Flower inside, so that each runs and is tested alone."""
