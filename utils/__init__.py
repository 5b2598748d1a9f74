"""Configuration, files and devices."""
