"""Worker processes that never outlive the flow that started them: a guard, and the flow's side of it."""
