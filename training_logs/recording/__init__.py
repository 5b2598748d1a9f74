"""Records that a run writes while it trains; nothing here reads them or draws."""
