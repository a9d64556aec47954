"""How ranks on several machines find, know and reach each other: of a trainer, and of an engine."""
