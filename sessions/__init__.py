"""Durable state: database models, repository, chunk store. Never imports torch."""
