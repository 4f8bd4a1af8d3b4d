"""Ids of operator variants, as plain strings `op.variant -> module:attribute`."""

CATALOGUE: dict[str, dict[str, str]] = {"ops": {}}
