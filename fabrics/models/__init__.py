"""Model families, initialisation, attention and export."""
