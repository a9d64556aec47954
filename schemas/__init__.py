"""The contract: the run file, the messages and their wire codec. Imports nothing else of StreamRL."""
