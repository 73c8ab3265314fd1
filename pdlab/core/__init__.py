"""The vocabulary every other room shares: errors, configuration, requests, plans, traces and clocks. No torch here."""
