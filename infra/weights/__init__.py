"""The weight plane: publishes versions of a model to the object store, and fetches and verifies them."""
