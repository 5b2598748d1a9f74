"""The configuration: schema, parsing and plugins."""
