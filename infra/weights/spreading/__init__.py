"""Plans which site fetches which chunk of a version from where."""
