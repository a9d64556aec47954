"""Monitoring: the figures of a run and its processes, as Prometheus reads them."""
