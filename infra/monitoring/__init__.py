"""Files for Prometheus and Grafana: a configuration, alert rules and a board."""
