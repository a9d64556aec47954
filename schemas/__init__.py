"""The contract: run file, messages, manifests and their wire codec. Imports nothing else of StreamRL."""
