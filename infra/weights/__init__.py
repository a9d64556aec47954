"""The weight plane: versions of a model in the object store, whole and verified."""
