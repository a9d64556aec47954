"""A run from its run file to its report: started, supervised, joined, replayed, removed."""
