"""Turns rewards into advantages: statistics over groups of attempts, and filters that say why they drop."""
