"""Object stores: whole objects by key, in a folder or on a server."""
