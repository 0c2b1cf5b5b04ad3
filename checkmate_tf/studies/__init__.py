"""Questions that take many plans: the largest batch, the curve of budgets."""
