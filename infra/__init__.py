"""What both sides stand on: bus, object store, weights, process supervision, the local stack."""
