"""Routes, status and settings for the page, and workers that start ahead of a run."""
