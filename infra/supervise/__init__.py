"""Processes that never outlive the one that wanted them: a guard, and the flow's side of it."""
