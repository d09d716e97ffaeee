"""Drafters in public formats: trained here, saved, imported, and run by `exact`."""
