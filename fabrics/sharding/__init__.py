"""Nodes of several devices (FSDP2)."""
