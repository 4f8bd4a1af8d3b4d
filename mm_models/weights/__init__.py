"""Weights: the rule algebra, file formats, the streaming engine, and live loading. Both targets stand on it."""
