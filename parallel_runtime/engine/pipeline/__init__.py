"""A network in pipeline stages over ranks."""
