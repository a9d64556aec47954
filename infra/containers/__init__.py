"""Images of StreamRL, and a run in containers with all services: Dockerfiles and compose.yaml."""
