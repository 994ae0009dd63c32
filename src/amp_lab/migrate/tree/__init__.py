"""A parsed file: its names and scopes, its steps of training, and what a rule found in it."""
