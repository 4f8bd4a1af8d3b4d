"""Every registered family held to what it claims: a family is tested by being registered."""
