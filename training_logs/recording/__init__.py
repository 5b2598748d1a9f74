"""What a run writes while it goes on; nothing here reads it back, and nothing here draws."""
