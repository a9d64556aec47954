"""Files: written whole, locked, private, and read from their ends."""
