"""What a run writes (`recording`), and what is shown of it (`showing`); the modules here are the commands."""
