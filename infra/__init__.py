"""Shared by producers and consumers: bus, object store, weights, process supervision, the local stack."""
