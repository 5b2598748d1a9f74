"""Model families, initialisation, attention, compilation and export."""
