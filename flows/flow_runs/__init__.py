"""Flow runs: their states, names, pages and deployments at a Prefect server."""
