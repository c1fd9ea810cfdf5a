"""A plan in words and pictures, for CP Plan, and the way out of a refusal."""
