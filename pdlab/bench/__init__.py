"""Measurement suites and the tidy tables they write, with provenance."""
