"""Papermill batches: jobs, results, reports."""
