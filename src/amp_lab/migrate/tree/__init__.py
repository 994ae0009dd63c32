"""A parsed file: its names and scopes, its training steps, and the findings of the rules."""
