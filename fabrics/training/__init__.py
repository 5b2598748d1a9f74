"""One round of one trainer. Start with outer_round.py."""
