"""Parts that several commands share. No command is here."""
