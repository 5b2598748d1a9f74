"""Documents, tokens, the order of examples and their partition among trainers."""
