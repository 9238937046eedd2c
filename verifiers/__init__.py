"""What decides whether a completion is right: one module per kind that is more than a few lines."""
